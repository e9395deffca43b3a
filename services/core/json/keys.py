"""Refuses JSON in which a key is given twice: parsers differ on which of the values counts.

Escapes are decoded first, so `"max\\u005ftokens"` is `max_tokens`. Most bodies are cleared by counting colons. The
others are read once more, by Python's own parser, which hands over the pairs of each object: 4 µs for a small body.
"""

import json
from typing import Any

from services.core.errors import Failure, Reason, invalid, quoted
from services.core.json.size import check_size

PATH_CHARACTERS_MAX = 128


class _Repeated(Exception):
    """A key is given twice."""


class _Marked(list[tuple[str, Any]]):
    """The pairs of an object."""


def check_keys(text: bytes, path: str = "", *, distinct: int = 0) -> None:
    """Raises Failure(INVALID_ARGUMENT) if a key is given twice in any object, and names it. `text`: valid JSON.

    A text that is too large for `check_size` is refused as there.

    `path`: of the value in the request. `distinct`: how many different keys its objects have at least. As each key has
    a colon, a text without more colons repeats none.
    """
    if text.count(b":") <= distinct:
        return
    check_size(text, path)
    decoded = text.decode()
    try:
        _QUICK.decode(decoded)
    except _Repeated:
        raise _named(decoded, path) from None
    except RecursionError as error:
        detail = f"{path or 'the body'} is nested too deeply: send flatter JSON"
        raise Failure(Reason.INVALID_ARGUMENT, detail, param=path or None) from error


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
