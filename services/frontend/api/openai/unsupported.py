"""Refuses fields by name that ask for something else than this version does, and fields that no API has."""

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

import msgspec

from services.core.errors import Failure, invalid, quoted
from services.frontend.api.openai.other_fields import Other, Others
from services.http.json_decode import FIELD_NAME_CHARACTERS_MAX

_NULL = b"null"
_LIKENESS_MIN = 0.75
"""How much a misspelt name must resemble a field that is suggested, from 0 to 1."""


class Place:
    """An object in a body whose fields are checked. `honoured`: the fields of its struct."""

    def __init__(self, honoured: Iterable[str], others: Others) -> None:
        self.honoured = frozenset(honoured)
        self.others = others
        self._uses = {_plain(name): other.use for name, other in others.items() if other.use}
        self._uses |= {_plain(name): name for name in self.honoured}

    def suggestion(self, name: str) -> str:
        """What was probably meant by an unknown name, or ""."""
        found = get_close_matches(_plain(name), self._uses, n=1, cutoff=_LIKENESS_MIN)
        return self._uses[found[0]] if found else ""


def check_fields(
    given: Mapping[str, msgspec.Raw], place: Place, *, path: str = "", ignores_unknown: bool = False
) -> None:
    """Refuse the first field, in alphabetical order, that is not honoured and asks for something.

    `ignores_unknown`: accept fields that neither the struct nor the table has. Raises Failure(INVALID_ARGUMENT).
    """
    for name in sorted(given.keys() - place.honoured):
        if bytes(given[name]) == _NULL:
            continue
        other = place.others.get(name)
        if other is not None:
            if not (other.has_no_effect or _is_neutral(given[name], other.neutral)):
                raise invalid(path + name, f"{path}{name} is not supported in this version: {_advice(other)}")
        elif not ignores_unknown:
            raise _unknown(name, place, path)


def _is_neutral(raw: msgspec.Raw, neutral: tuple[Any, ...]) -> bool:
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):  # A number out of range, or JSON that is nested too deeply.
        return False
    return any(_is_same(value, accepted) for accepted in neutral)


def _is_same(value: Any, accepted: Any) -> bool:
    # False == 0 in Python, but `logprobs: 0` asks for log probabilities and `logprobs: false` does not.
    return isinstance(value, bool) == isinstance(accepted, bool) and value == accepted


def _advice(other: Other) -> str:
    return ", or ".join(_ways_out(other))


def _ways_out(other: Other) -> Iterator[str]:
    if other.neutral:
        yield f"leave it out or set it to {msgspec.json.encode(other.neutral[0]).decode()}"
    else:
        yield "leave it out"
    if other.use:
        yield f"use {other.use}"


def _unknown(name: str, place: Place, path: str) -> Failure:
    meant = place.suggestion(name[:FIELD_NAME_CHARACTERS_MAX])
    question = f" Did you mean {path}{meant}?" if meant else ""
    detail = f"{quoted(path + name)} is not a field of this API: check its spelling, or leave it out.{question}"
    return invalid(path + name[:FIELD_NAME_CHARACTERS_MAX], detail)


def _plain(name: str) -> str:
    """`maxTokens` and `Max-Tokens` are spellings of `max_tokens`."""
    return name.lower().replace("_", "").replace("-", "")
