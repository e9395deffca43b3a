"""Decodes JSON bodies into structs. Errors are sentences that name the field."""

import re
from collections.abc import Container, Mapping
from typing import TypeVar

import msgspec
from msgspec import Raw
from msgspec.json import Decoder

from services.core.errors import Failure, invalid, quoted
from services.core.json.keys import check_keys
from services.core.json.text import REPAIRED_BYTES_MAX, broken, syntax_fault, with_whole_numbers

T = TypeVar("T")

FIELD_BYTES_MAX = 1024 * 1024
"""Bytes of one field of a body, except fields that a model reads."""
FIELD_NAME_CHARACTERS_MAX = 128

MISSING = "is required: add it"
"""The end of the refusal of a body without a required field."""

FIELDS = Decoder(dict[str, Raw])
"""Decodes an object, and leaves its fields undecoded."""

_WHERE = re.compile(r"^(?P<what>.*?)(?: - at `(?:key in )?\$\.?(?P<path>.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>.*)`$")
_TYPES = re.compile(r"^Expected `(?P<wanted>.*)`, got `(?P<got>.*)`$")
_LENGTH = re.compile(r"^Expected `array` of length <= (?P<most>\d+)$")
_BOUND = re.compile(r"^Expected `\w+` (?P<sign>[<>]=?) (?P<number>.*)$")
_COMPARED = {">=": "at least", "<=": "at most", ">": "above", "<": "below"}
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a string",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_NUMBERS = ("int", "float")


def fields_of(body: bytes, *, large: Container[str] = ()) -> dict[str, Raw]:
    """The fields of a body, undecoded. `body`: see `readable`.

    Raises Failure(INVALID_ARGUMENT) if the body is not a JSON object, if a key is given twice, or if a field that is
    not in `large` is longer than FIELD_BYTES_MAX: decoding it would block the event loop.
    """
    fields = decode(body, FIELDS)
    if len(body) > FIELD_BYTES_MAX:
        _check_sizes(fields, large)
    check_keys(body, distinct=len(fields))
    return fields


def _check_sizes(fields: Mapping[str, Raw], large: Container[str]) -> None:
    for name, value in fields.items():
        if memoryview(value).nbytes > FIELD_BYTES_MAX and name not in large:
            raise invalid(name[:FIELD_NAME_CHARACTERS_MAX], f"{quoted(name)} is longer than 1 MiB: shorten it")


def decode(body: bytes | Raw, decoder: Decoder[T]) -> T:
    """The decoded body. Raises Failure(INVALID_ARGUMENT) with the path of the field that does not fit.

    `decoder`: should be made once, since making one takes longer than decoding.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        if _wants_whole(str(error)):
            return _decode_whole(bytes(body), decoder, error)
        raise misfit(str(error)) from error
    except msgspec.DecodeError as error:
        raise broken(f"the body is not valid JSON: {syntax_fault(bytes(body), error)}") from error
    except RecursionError as error:
        raise broken("the body is nested too deeply: send flatter JSON") from error


def _wants_whole(text: str) -> bool:
    """Whether msgspec's message is about a number with a fraction or an exponent where a whole one must be."""
    types = _TYPES.match(text.partition(" - at ")[0])
    return types is not None and types["got"] == "float" and "int" in types["wanted"].split(" | ")


def _decode_whole(body: bytes, decoder: Decoder[T], error: msgspec.ValidationError) -> T:
    """The body decoded with whole numbers in digits: JSON has one kind of number, and 16.0 is 16."""
    if len(body) > REPAIRED_BYTES_MAX:
        path = _path_of(str(error))
        raise invalid(path, f"{path} must be a whole number, written in digits") from error
    whole = with_whole_numbers(body)
    try:
        return decoder.decode(whole)
    except msgspec.ValidationError as second:
        if _wants_whole(str(second)) and _is_too_large(body, decoder, str(second)):
            path = _path_of(str(second))
            raise invalid(path, f"{path} is out of range: send a smaller number") from error
        raise misfit(str(second)) from error


def _is_too_large(body: bytes, decoder: Decoder[T], text: str) -> bool:
    """Whether the number that msgspec's message is about is whole."""
    try:
        decoder.decode(with_whole_numbers(body, cut=True))
    except msgspec.ValidationError as error:
        return str(error) != text
    return True


def _path_of(text: str) -> str:
    found = _WHERE.match(text)
    assert found is not None, "every part of the pattern is optional"
    return found["path"] or ""


def misfit(text: str) -> Failure:
    """Translates msgspec's message about a wrong value into a failure."""
    found = _WHERE.match(text)
    assert found is not None, "every part of the pattern is optional"
    what, path = found["what"], found["path"] or ""
    if missing := _MISSING.match(what):
        param = f"{path}.{missing['name']}" if path else missing["name"]
        return invalid(param, f"{param} {MISSING}")
    if not path:
        return broken("the body must be a JSON object")
    return invalid(path, f"{path} {_reworded(what)}")


def _reworded(what: str) -> str:
    if types := _TYPES.match(what):
        wanted = " or ".join(_WORDS.get(name, name) for name in types["wanted"].split(" | ") if name != "null")
        got = "a number" if types["got"] in _NUMBERS else _WORDS.get(types["got"], types["got"])
        is_fraction = _WORDS["int"] in wanted and types["got"] == "float"  # "not a number" would be wrong: it is one.
        return f"must be {wanted}" if is_fraction else f"must be {wanted}, not {got}"
    if length := _LENGTH.match(what):
        return f"must have at most {length['most']} items"
    if bound := _BOUND.match(what):
        return f"must be {_COMPARED[bound['sign']]} {bound['number']}"
    return f"is invalid: {what[:1].lower()}{what[1:]}"
