"""The text of a JSON body before it is decoded: what is repaired, and what is wrong with the rest, and where.

A byte order mark is dropped (RFC 8259, section 8.1). Half a surrogate pair, which tools send that cut text by UTF-16
units, becomes U+FFFD, as in Go's encoding/json. Nothing else is repaired.
"""

import re
from codecs import BOM_UTF8
from decimal import Decimal, InvalidOperation

from services.core.errors import Failure, Reason, quoted

REPAIRED_BYTES_MAX = 1024 * 1024
"""Longer texts are not repaired: it would block the event loop."""
EXPONENTS_MAX = 1024
"""Numbers with an exponent in a text, up to which its numbers are rewritten. Each takes 2 µs."""
NUMBER_CHARACTERS_MAX = 1000
"""Longer spellings of a whole number are not recognised as one."""
_DIGITS_MAX = 22
TOO_LARGE = 10**_DIGITS_MAX
"""Greater numbers do not fit any field of whole numbers. Up to here every whole float is exact."""
FOUND_CHARACTERS_MAX = 20
"""How much of the text at a fault is quoted."""

_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)
"""An escape in a string: a surrogate pair, half a pair (the group), or any other."""
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
_NUMBER = re.compile(
    rb'((?:[^"0-9]++|"[^"\\]*+(?:\\.[^"\\]*+)*+"|[0-9]++(?![0-9.eE])|")*+)'
    rb"(?:([0-9]++)((?:\.[0-9]++)?+)((?:[eE][+-]?+[0-9]++)?+)|\Z)",
    re.DOTALL,
)
"""All up to the next number with a fraction or an exponent; and the digits, the fraction and the exponent of that.

It matches at every position, so no part of a text is read twice. A sign is no part of the number.
"""
_POSITION = re.compile(r"^JSON is malformed: (?P<what>.*) \(byte (?P<byte>\d+)\)$")
_FAULTS = {
    "trailing comma": "there is a comma before the closing bracket",
    "trailing characters": "there is more text after the end of the JSON",
    "invalid number": "there is a number that JSON cannot spell (such as 01 or 1.)",
}
"""What msgspec says → in words that say what to look for."""
_TYPOGRAPHIC = 'strings need straight double quotes ("), and there is a typographic quote'
_BEGINNINGS = {
    "/": "JSON has no comments, and there is one",
    "#": "JSON has no comments, and there is one",
    "\u201c": _TYPOGRAPHIC,
    "\u201d": _TYPOGRAPHIC,
    "\u201e": _TYPOGRAPHIC,
    "\u00ab": _TYPOGRAPHIC,
    "\u00bb": _TYPOGRAPHIC,
    "\u2018": _TYPOGRAPHIC,
    "\u2019": _TYPOGRAPHIC,
    "\uff02": _TYPOGRAPHIC,
    "'": "strings need double quotes, and there is a single quote",
    ".": "a number must begin with a digit",
    "+": "a number must begin with a digit or a minus",
}
"""The text at the fault → what is wrong with it."""
_WORDS = {"True": "true", "False": "false", "None": "null", "undefined": "null"}
_WORD = re.compile(r"-?[A-Za-z_]+")


def readable(body: bytes) -> bytes:
    """The body in UTF-8, repaired. Raises Failure(INVALID_ARGUMENT) if it is empty or in another encoding."""
    body = body.removeprefix(BOM_UTF8)
    if (encoding := _wide_encoding(body)) is not None:
        raise broken(f"the body is not UTF-8 but {encoding}: send JSON in UTF-8")
    try:
        if not body.isascii():  # As most are. This is many times faster than decoding.
            body.decode()  # msgspec checks only strings that it decodes.
    except UnicodeDecodeError as error:
        raise broken(f"the body is not UTF-8: {error.reason} at byte {error.start}") from error
    return with_whole_characters(body) if len(body) <= REPAIRED_BYTES_MAX else body


def _wide_encoding(body: bytes) -> str | None:
    """UTF-32 or UTF-16, which begin with a byte order mark or with the zeros of an ASCII character."""
    if body.startswith((b"\x00\x00\xfe\xff", b"\xff\xfe\x00\x00", b"\x00\x00\x00")) or body[1:4] == b"\x00\x00\x00":
        return "UTF-32"
    return "UTF-16" if body.startswith((b"\xff\xfe", b"\xfe\xff", b"\x00")) or body[1:2] == b"\x00" else None


def with_whole_characters(text: bytes) -> bytes:
    """The JSON text with U+FFFD for each escaped half of a surrogate pair."""
    if b"\\ud" not in text and b"\\uD" not in text:
        return text
    return _ESCAPE.sub(lambda found: rb"\ufffd" if found[1] else found[0], text)


def with_whole_numbers(text: bytes, *, cut: bool = False) -> bytes:
    """The JSON text with whole numbers such as 16.0 and 1e2 in digits. `text`: valid JSON.

    `cut`: numbers beyond TOO_LARGE, which stay as they are otherwise, become TOO_LARGE.
    """

    pieces: list[bytes] = []
    end, exponents_left = 0, EXPONENTS_MAX
    for found in _NUMBER.finditer(text):
        before, digits, fraction, exponent = found.groups(b"")
        pieces.append(before)
        end = found.end()
        if exponent:
            exponents_left -= 1
        if exponents_left < 0:
            end = found.end(1)
            break
        pieces.append(_plain(digits, fraction, exponent, cut=cut))
    return b"".join([*pieces, text[end:]])


def _plain(digits: bytes, fraction: bytes, exponent: bytes, *, cut: bool) -> bytes:
    """The number in digits if it is whole and not too large. `cut`: see `with_whole_numbers`."""
    number = digits + fraction + exponent
    if len(number) > NUMBER_CHARACTERS_MAX:
        return number
    if not exponent and not fraction.strip(b".0") and len(digits) <= _DIGITS_MAX:  # 16.0 is usual, and quickest.
        return digits
    if float(number) >= TOO_LARGE:
        return b"%d" % TOO_LARGE if cut else number
    try:
        exact = Decimal(number.decode())
    except InvalidOperation:  # An exponent of more than 18 digits.
        return number
    return b"%d" % exact if exact == exact.to_integral_value() else number


def broken(detail: str) -> Failure:
    """The failure of a body that is no JSON; no field is to blame."""
    return Failure(Reason.INVALID_ARGUMENT, detail)


def syntax_fault(text: bytes, error: Exception) -> str:
    """What is wrong with a text that is not JSON, and where. `error`: msgspec's DecodeError about it."""
    if not text.strip():
        return "it is empty"
    if (found := _POSITION.match(str(error))) is None:
        if _HALF.search(text[-16:]):  # msgspec looks for the other half beyond the end.
            return "there is half a surrogate pair in its last string"
        return f"it ends too early, after {len(text)} bytes"
    position = min(int(found["byte"]), len(text))
    what = found["what"]
    if "escape" in what or "surrogate" in what:
        position = max(text.rfind(b"\\", 0, position + 1), 0)
    if what.startswith("trailing characters"):
        position -= 1
    return f"{_explained(what, text, position)} at {_place(text, position)}"


def _place(text: bytes, position: int) -> str:
    line_start = text.rfind(b"\n", 0, position) + 1
    line = text.count(b"\n", 0, position) + 1
    column = len(text[line_start:position].decode(errors="replace")) + 1
    return f"byte {position} (line {line}, column {column})"


def _explained(what: str, text: bytes, position: int) -> str:
    rest = text[position : position + FOUND_CHARACTERS_MAX].decode(errors="replace")
    if _HALF.match(text, position):
        return "there is half a surrogate pair"
    if "escape" in what:
        size = 6 if rest.startswith("\\u") else 2
        return f"{quoted(rest[:size])} is not an escape of JSON"
    for known, sentence in _FAULTS.items():
        if what.startswith(known):
            return sentence
    if rest.startswith("@") and not text[:position].strip():
        return "a file's name was sent instead of its content (curl sends the content with --data, not with --data-raw)"
    for beginning, sentence in _BEGINNINGS.items():
        if rest.startswith(beginning):
            return sentence
    if rest[:1] and rest[0] < " ":
        return f"there is a raw control character (in a string, write it as {_escaped(rest[0])})"
    if word := _WORD.match(rest):
        return _about_word(word[0], is_key="keys" in what)
    return f"{what}, got {quoted(rest)}" if rest else what


def _about_word(word: str, *, is_key: bool) -> str:
    if is_key:
        return f"keys need double quotes: {quoted(word)} has none"
    if word in _WORDS:
        return f"{quoted(word)} is not JSON: write {_WORDS[word]}"
    if word.lstrip("-") in {"NaN", "Infinity", "inf", "nan"}:
        return f"{quoted(word)} is not a number in JSON"
    return f"{quoted(word)} is not a value of JSON"


def _escaped(character: str) -> str:
    return {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(character, f"\\u{ord(character):04x}")
