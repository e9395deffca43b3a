"""Refuses JSON in which a key is given twice: parsers differ on which of the values counts.

Escapes are decoded first, so `"max\\u005ftokens"` is `max_tokens`. Most bodies are cleared by counting colons. The
others are read once more, by Python's own parser, which hands over the pairs of each object: 4 µs for a small body.
"""

import json
import re
from typing import Any

from services.core.errors import Failure, Reason, invalid, quoted

PATH_CHARACTERS_MAX = 128
CONTAINERS_MAX = 65_536
"""Lists and objects of a text. Python's parser makes each in up to 1 µs, and no other thread runs meanwhile."""

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


class _Repeated(Exception):
    """A key is given twice."""


class _Marked(list[tuple[str, Any]]):
    """The pairs of an object."""


def check_keys(text: bytes, path: str = "", *, distinct: int = 0) -> None:
    """Raises Failure(INVALID_ARGUMENT) if a key is given twice in any object, and names it. `text`: valid JSON.

    So does a text of more than CONTAINERS_MAX lists and objects.

    `path`: of the value in the request. `distinct`: how many different keys its objects have at least. As each key has
    a colon, a text without more colons repeats none.
    """
    if text.count(b":") <= distinct:
        return
    if _has_too_many(text):
        detail = f"{path or 'the body'} has more than {CONTAINERS_MAX} lists and objects: send fewer"
        raise Failure(Reason.INVALID_ARGUMENT, detail, param=path or None)
    decoded = text.decode()
    try:
        _QUICK.decode(decoded)
    except _Repeated:
        raise _named(decoded, path) from None
    except RecursionError as error:
        detail = f"{path or 'the body'} is nested too deeply: send flatter JSON"
        raise Failure(Reason.INVALID_ARGUMENT, detail, param=path or None) from error


def _has_too_many(text: bytes) -> bool:
    if _brackets(text) <= CONTAINERS_MAX:  # Brackets in strings included, as in most texts.
        return False
    return _brackets(_STRING.sub(b"", text)) > CONTAINERS_MAX


def _brackets(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{")


def _check_pairs(pairs: list[tuple[str, Any]]) -> None:
    if len(dict(pairs)) != len(pairs):
        raise _Repeated


# A number's digits are not converted: `len` is called instead.
_QUICK = json.JSONDecoder(object_pairs_hook=_check_pairs, parse_int=len, parse_float=len)
_THOROUGH = json.JSONDecoder(object_pairs_hook=_Marked, parse_int=len, parse_float=len)


def _named(decoded: str, path: str) -> Failure:
    """The failure that names the first key that is given twice, the outermost first."""
    waiting: list[tuple[str, Any]] = [(path, _THOROUGH.decode(decoded))]
    for where, value in waiting:
        if isinstance(value, _Marked):
            seen = set()
            for key, inner in value:
                name = f"{where}.{key}" if where else key
                if key in seen:
                    return invalid(name[:PATH_CHARACTERS_MAX], f"{quoted(name)} is given twice: give it once")
                seen.add(key)
                waiting.append((name, inner))
        elif isinstance(value, list):
            waiting += [(f"{where}[{index}]", inner) for index, inner in enumerate(value)]
    raise AssertionError("unreachable: called only if a key is given twice")
