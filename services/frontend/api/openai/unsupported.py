"""Refuses fields by name that ask for something else than this version does, and misspelt ones."""

from collections.abc import Container, Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

import msgspec

from services.core.errors import Failure, invalid, quoted
from services.frontend.api.openai.other_fields import Other, Others
from services.http.json_decode import FIELD_NAME_CHARACTERS_MAX
from services.http.server.config import UnknownFields

UNKNOWN_FIELDS_MAX = 100
"""Different unknown fields of one request: comparing a name with all fields takes up to 0.3 ms."""
MISSPELT_CHARACTERS_MAX = 48
"""Longer names are not compared."""
_LIKENESS_MIN = 0.8
"""How much a misspelt name resembles the right one, from 0 to 1 as difflib counts it."""
_NULL = b"null"
_NOT_MISSED = frozenset({"user"})
"""Honoured fields without effect: a client that misspells one misses nothing."""


class Place:
    """An object in a body whose fields are checked.

    `honoured`: the fields of its struct. `is_strict`: it describes the answer, so unknown fields are never ignored.
    """

    def __init__(self, honoured: Iterable[str], others: Others, *, is_strict: bool = False) -> None:
        self.honoured = frozenset(honoured)
        self.others = others
        self.is_strict = is_strict
        self._meant = {_plain(name): other.use or name for name, other in others.items() if not other.has_no_effect}
        self._spelt = {_plain(name): name for name in sorted(self.honoured - _NOT_MISSED)}

    def meant_by(self, name: str, given: Container[str]) -> str | None:
        """What an unknown name was probably meant to say; None: it resembles no field that is not `given`."""
        if len(name) > MISSPELT_CHARACTERS_MAX:
            return None
        plain = _plain(name)
        if (meant := self._spelt.get(plain) or self._meant.get(plain)) is not None:
            return meant
        missed = [spelt for spelt, field in self._spelt.items() if field not in given]
        found = get_close_matches(plain, missed, n=1, cutoff=_LIKENESS_MIN)
        return self._spelt[found[0]] if found else None


class FieldCheck:
    """Checks the objects of one request. `unknown_fields`: see HttpConfig."""

    def __init__(self, unknown_fields: UnknownFields) -> None:
        self._unknown_fields = unknown_fields
        self._ignored: set[tuple[Place, str]] = set()

    def check(self, given: Mapping[str, msgspec.Raw], place: Place, *, path: str = "") -> None:
        """Refuse the first field, in alphabetical order, that is not honoured and asks for something.

        Raises Failure(INVALID_ARGUMENT).
        """
        for name in sorted(given.keys() - place.honoured):
            if bytes(given[name]) == _NULL:
                continue
            other = place.others.get(name)
            if other is None:
                self._check_unknown(name, given, place, path)
            elif not (other.has_no_effect or _is_neutral(given[name], other.neutral)):
                raise invalid(path + name, f"{path}{name} is not supported in this version: {_advice(other)}")

    def _check_unknown(self, name: str, given: Container[str], place: Place, path: str) -> None:
        is_ignored = not place.is_strict and self._unknown_fields != "refuse"
        if is_ignored and (self._unknown_fields == "ignore" or (place, name) in self._ignored):
            return
        meant = place.meant_by(name, given)
        if not is_ignored or meant is not None:
            raise _unknown(name, meant, path)
        self._ignored.add((place, name))
        if len(self._ignored) > UNKNOWN_FIELDS_MAX:
            detail = f"the request has more than {UNKNOWN_FIELDS_MAX} fields that this API has not: leave them out"
            raise invalid(path + name[:FIELD_NAME_CHARACTERS_MAX], detail)


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


def _unknown(name: str, meant: str | None, path: str) -> Failure:
    question = f" Did you mean {meant}?" if meant else ""
    detail = f"{quoted(path + name)} is not a field of this API: check its spelling, or leave it out.{question}"
    return invalid(path + name[:FIELD_NAME_CHARACTERS_MAX], detail)


def _plain(name: str) -> str:
    """`maxTokens` and `Max-Tokens` are spellings of `max_tokens`."""
    return name.lower().replace("_", "").replace("-", "")
