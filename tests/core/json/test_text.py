"""JSON text is repaired where it has one obvious meaning; otherwise the sentence says what is wrong, and where."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.errors import Failure
from services.core.json import text as text_module
from services.core.json.text import (
    EXPONENTS_MAX,
    NUMBER_CHARACTERS_MAX,
    REPAIRED_BYTES_MAX,
    readable,
    syntax_fault,
    with_whole_characters,
    with_whole_numbers,
)


def fault_of(text: bytes) -> str:
    with pytest.raises(msgspec.DecodeError) as caught:
        msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    return syntax_fault(text, caught.value)


def test_byte_order_mark_is_dropped() -> None:
    assert readable(b'\xef\xbb\xbf{"a": 1}') == b'{"a": 1}'


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
def test_other_encoding_is_refused_by_its_name(encoding: str) -> None:
    with pytest.raises(Failure, match=f"not UTF-8 but {encoding[:6].upper()}: send JSON in UTF-8"):
        readable('{"model": "m"}'.encode(encoding))


def test_byte_that_is_not_utf_8_is_told_by_its_position() -> None:
    with pytest.raises(Failure, match="the body is not UTF-8: invalid start byte at byte 6"):
        readable(b'{"a":"\xff"}')


@pytest.mark.parametrize(
    ("text", "repaired"),
    [
        (rb'"\ud83d"', "\ufffd"),
        (rb'"\ud83d and more"', "\ufffd and more"),
        (rb'"\ude00"', "\ufffd"),
        (rb'"\uDE00\uD83D"', "\ufffd\ufffd"),
        (rb'"\ude00\ude00"', "\ufffd\ufffd"),
        (rb'"\ud83d\ude00"', "\N{GRINNING FACE}"),
        (rb'"\ud83d\ud83d\ude00"', "\ufffd\N{GRINNING FACE}"),
        (rb'"\\ud83d"', "\\ud83d"),
        (rb'"\\\ud83d"', "\\\ufffd"),
        (rb'"\ud83d\n"', "\ufffd\n"),
        (rb'"\u00e9"', "\N{LATIN SMALL LETTER E WITH ACUTE}"),
    ],
)
def test_half_a_surrogate_pair_becomes_the_replacement_character(text: bytes, repaired: str) -> None:
    assert json.loads(with_whole_characters(text)) == repaired


@given(st.text(st.characters(), max_size=20))
def test_all_other_text_stays_as_it_is(text: str) -> None:
    """Compared with Python's own decoder, which keeps halves of pairs."""
    halved = "".join("\ufffd" if "\ud800" <= one <= "\udfff" else one for one in json.loads(json.dumps(text)))

    assert json.loads(with_whole_characters(json.dumps(text).encode())) == halved


def test_long_text_is_not_repaired() -> None:
    """It would block the event loop for seconds."""
    text = rb'{"a": "\ud83d", "b": "' + b"x" * REPAIRED_BYTES_MAX + b'"}'

    assert readable(text) is text


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (rb'{"a": "\ud83d and more text"}', "there is half a surrogate pair at byte 7 (line 1, column 8)"),
        (rb'{"a": "\ude00 and more text"}', "there is half a surrogate pair at byte 7 (line 1, column 8)"),
        (rb'{"a": "\ud83d"}', "there is half a surrogate pair in its last string"),
    ],
)
def test_half_a_surrogate_pair_that_is_not_repaired_is_told(text: bytes, fault: str) -> None:
    assert fault_of(text) == fault


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        (b"16.0", b"16"),
        (b"1e2", b"100"),
        (b"1.5E+1", b"15"),
        (b"160e-1", b"16"),
        (b"-1.0", b"-1"),
        (b"-0.0", b"-0"),
        (b"9007199254740993.0", b"9007199254740993"),
        (b"18446744073709551615.000", b"18446744073709551615"),
        (b"16.5", b"16.5"),
        (b"1e-5", b"1e-5"),
        (b"1e-999999999999", b"1e-999999999999"),
        (b"1e-99999999999999999999", b"1e-99999999999999999999"),
        (b"0e99999999999999999999", b"0e99999999999999999999"),
        (b"1e30", b"1e30"),
        (b"1e999999999999", b"1e999999999999"),
        (b"18446744073709551615", b"18446744073709551615"),
        (b"1." + b"0" * NUMBER_CHARACTERS_MAX, b"1." + b"0" * NUMBER_CHARACTERS_MAX),
        (rb'["1.0", "\"1.0", 1.0, {"1.0": 2.0}]', rb'["1.0", "\"1.0", 1, {"1.0": 2}]'),
    ],
)
def test_whole_numbers_are_written_in_digits(text: bytes, whole: bytes) -> None:
    assert with_whole_numbers(text) == whole


def test_numbers_after_too_many_exponents_stay_as_they_are() -> None:
    """A bug: a text of them held up all streams for seconds."""
    text = b"1e1," * (EXPONENTS_MAX - 1) + b'1.0,"1.0",'

    assert with_whole_numbers(text + b"1e1,[1e1,1.0]") == b"10," * (EXPONENTS_MAX - 1) + b'1,"1.0",10,[1e1,1.0]'


@pytest.mark.parametrize("piece", [b"1,", b'"1.0",', b'"', b'"\\', b"-"])
def test_nothing_but_numbers_with_fractions_costs_a_call(piece: bytes) -> None:
    """Bug in the making: each integer and each string cost one, and what is not JSON could be read many times."""
    assert len(text_module._NUMBER.findall(b"1.0" + piece * 1000 + b"1e1")) <= 4


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (b"", "it is empty"),
        (b" \n", "it is empty"),
        (b'{"a": "b', "it ends too early, after 8 bytes"),
        (b'{"a":1,}', "there is a comma before the closing bracket at byte 7 (line 1, column 8)"),
        (b'{"a":[1,]}', "there is a comma before the closing bracket at byte 8 (line 1, column 9)"),
        (
            b"{\"a\":1,\n  'b': 2}",
            "strings need double quotes, and there is a single quote at byte 10 (line 2, column 3)",
        ),
        (b"{a: 1}", "keys need double quotes: 'a' has none at byte 1 (line 1, column 2)"),
        (b'{"a":1 // one\n}', "JSON has no comments, and there is one at byte 7 (line 1, column 8)"),
        (b'/* */ {"a":1}', "JSON has no comments, and there is one at byte 0 (line 1, column 1)"),
        (b'{"a":NaN}', "'NaN' is not a number in JSON at byte 5 (line 1, column 6)"),
        (b'{"a":-Infinity}', "'Infinity' is not a number in JSON at byte 6 (line 1, column 7)"),
        (b'{"a":True}', "'True' is not JSON: write true at byte 5 (line 1, column 6)"),
        (b'{"a":None}', "'None' is not JSON: write null at byte 5 (line 1, column 6)"),
        (
            b'{"a":"x\ny"}',
            r"there is a raw control character (in a string, write it as \n) at byte 7 (line 1, column 8)",
        ),
        (
            b'{"a":"x\x01y"}',
            r"there is a raw control character (in a string, write it as \u0001) at byte 7 (line 1, column 8)",
        ),
        (rb'{"a":"\x"}', r"'\\x' is not an escape of JSON at byte 6 (line 1, column 7)"),
        (rb'{"\x":1}', r"'\\x' is not an escape of JSON at byte 2 (line 1, column 3)"),
        (rb'{"a":"\u12zz"}', r"'\\u12zz' is not an escape of JSON at byte 6 (line 1, column 7)"),
        (b'{"a":.5}', "a number must begin with a digit at byte 5 (line 1, column 6)"),
        (b'{"a":+5}', "a number must begin with a digit or a minus at byte 5 (line 1, column 6)"),
        (b'{"a":01}', "there is a number that JSON cannot spell (such as 01 or 1.) at byte 6 (line 1, column 7)"),
        (b'{"a":1} {}', "there is more text after the end of the JSON at byte 8 (line 1, column 9)"),
        (b'{"a" 1}', "expected ':', got '1}' at byte 5 (line 1, column 6)"),
        ('{"é":1,\n"é" 1}'.encode(), "expected ':', got '1}' at byte 14 (line 2, column 5)"),
        (b"model=m", "'model' is not a value of JSON at byte 0 (line 1, column 1)"),
    ],
)
def test_fault_is_told_with_its_place(text: bytes, fault: str) -> None:
    """Bug: half a surrogate pair, and an empty body, were "truncated", and every other fault "malformed"."""
    assert fault_of(text) == fault


def test_name_of_a_file_in_place_of_its_content_is_explained() -> None:
    assert fault_of(b"@body.json").startswith("a file's name was sent instead of its content (curl sends the content")
    assert "file's name" not in fault_of(b'{"a": @b}')


@pytest.mark.parametrize(
    "text", ["{\u201cmodel\u201d: 1}", '{"a": \u201ex\u201c}', "{\u2018a\u2019: 1}", '{"a": \u00abx\u00bb}']
)
def test_typographic_quotes_are_called_so(text: str) -> None:
    assert fault_of(text.encode()).startswith('strings need straight double quotes ("), and there is a typographic')
