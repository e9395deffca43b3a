"""Bodies with too many values are refused before they are decoded; text in strings counts for nothing."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.errors import Failure, Reason
from services.core.json import size
from services.core.json.size import CONTAINERS_MAX, VALUES_MAX, WINDOW_BYTES, check_size

HOSTILE_BYTES = 4 * WINDOW_BYTES


@pytest.mark.parametrize("empty", [b"[]", b"{}"])
def test_text_with_too_many_lists_and_objects_is_refused(empty: bytes) -> None:
    """A bug: 16 MiB of empty lists, and a text with colons, held up all streams for seconds."""
    most = b'{"a": [' + b",".join([empty] * (CONTAINERS_MAX - 2)) + b"]}"

    check_size(most)
    with pytest.raises(Failure, match="the body has more than 16384 lists and objects: send fewer") as caught:
        check_size(most.replace(b"[", b"[[],", 1))

    assert caught.value.reason is Reason.INVALID_ARGUMENT


@pytest.mark.parametrize("value", [b"1", b'""', b'"\\",["', b"null"])
def test_text_with_too_many_values_is_refused(value: bytes) -> None:
    """A bug: 64 MiB of token ids held up all streams for more than a second."""
    most = b"[" + b",".join([value] * (VALUES_MAX + 1)) + b"]"

    check_size(most)
    with pytest.raises(Failure, match="prompt has more than 262144 values: send fewer") as caught:
        check_size(most.replace(b"[", b"[0,", 1), "prompt")

    assert caught.value.param == "prompt"


@pytest.mark.parametrize("written", ["[,{", '"a", "b": ', "\\\\", '\\"', "\\"])
def test_marks_in_strings_are_no_values(written: str) -> None:
    check_size(json.dumps({"a": written * (VALUES_MAX + 1), "b": ["[" * CONTAINERS_MAX] * 2}).encode())


@pytest.mark.parametrize("piece", [b"1,", b'"",', b'"a":1,', b"[],", b'"', b'\\"', b'"\\",', b'"",[]{}'])
def test_work_on_a_hostile_text_does_not_grow_with_it(piece: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond what the bounds allow, only text within strings is read: one window at a time."""
    windows = 0
    read = size._outside_strings

    def counted(text: bytes) -> object:
        nonlocal windows
        for window in read(text):
            windows += 1
            yield window

    monkeypatch.setattr(size, "_outside_strings", counted)
    least = piece * (12 * WINDOW_BYTES // len(piece))

    for text in (least, least * 2):
        with pytest.raises(Failure):
            check_size(b"," * VALUES_MAX + b",[" * 9 + text)

    assert windows <= 2 * 12


@given(st.text(alphabet='\\",[{a', max_size=60), st.integers(2, 9))
def test_windows_that_cut_a_text_anywhere_count_the_same(text: str, width: int) -> None:
    body = json.dumps([text, 1, {text: [text]}]).encode()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(size, "WINDOW_BYTES", width)
        outside = b"".join(found for found, _ in size._outside_strings(body))

    assert outside == b"[, 1, {: []}]"
