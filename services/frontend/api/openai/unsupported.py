"""Refuses fields by name that ask for something else than this version does, and misspelt ones."""

from collections.abc import Container, Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

import msgspec

from services.core.errors import Failure, invalid, quoted
from services.frontend.api.openai.other_fields import Other, Others
from services.http.json_decode import FIELD_NAME_CHARACTERS_MAX
from services.http.server.config import UnknownFields

UNKNOWN_FIELDS_MAX = 32
"""Different unknown fields of one request: comparing a name with all fields takes up to 2 ms."""
MISSPELT_CHARACTERS_MAX = 48
"""Longer names are not compared."""
_LIKENESS_MIN = 0.8
"""How much a misspelt name resembles the right one, from 0 to 1 as difflib counts it."""
_ONE_EDIT_LENGTH, _TWO_EDITS_LENGTH = 5, 10
"""How long a name must be, without separators, for one and for two letters of it to be wrong."""
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
        self._meant = {_plain(name): other.use or name for name, other in others.items()}
        self._spelt = {_plain(name): name for name in sorted(self.honoured - _NOT_MISSED)}
        self._by_length: dict[int, list[tuple[str, str]]] = {}
        for known, meant in (self._spelt | self._meant).items():
            self._by_length.setdefault(len(known), []).append((known, meant))

    def meant_by(self, name: str, given: Container[str]) -> str | None:
        """What an unknown name was probably meant to say; None: it resembles no field that is not `given`."""
        if len(name) > MISSPELT_CHARACTERS_MAX:
            return None
        plain = _plain(name)
        if (meant := self._spelt.get(plain) or self._meant.get(plain)) is not None:
            return meant
        missed = [spelt for spelt, field in self._spelt.items() if field not in given]
        if found := get_close_matches(plain, missed, n=1, cutoff=_LIKENESS_MIN):
            return self._spelt[found[0]]
        for length in range(len(plain) - 2, len(plain) + 3):
            for known, meant in self._by_length.get(length, ()):
                if _is_misspelt(plain, known):
                    return meant
        return None


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
            elif not (other.has_no_effect or _is_neutral(given[name], other.neutral) or _is_idle(name, other, given)):
                with_ = f" with {_listed(other.detail_of)}" if other.detail_of else ""
                raise invalid(path + name, f"{path}{name} is not supported{with_} in this version: {_advice(other)}")

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


def _is_idle(name: str, other: Other, given: Mapping[str, msgspec.Raw]) -> bool:
    """Whether the field asks for nothing in this request, because of the values of other fields."""
    if other.neutral_like and other.neutral_like in given:
        return _is_neutral(given[name], (msgspec.json.decode(given[other.neutral_like]),))
    return bool(other.detail_of) and all(
        _is_neutral(given[of], (off, None)) for of, off in other.detail_of.items() if of in given
    )


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
        like = f" or to the value of {other.neutral_like}" if other.neutral_like else ""
        yield f"leave it out or set it to {msgspec.json.encode(other.neutral[0]).decode()}{like}"
    else:
        yield "leave it out"
    if other.use:
        yield f"use {other.use}"


def _listed(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def _unknown(name: str, meant: str | None, path: str) -> Failure:
    question = f" Did you mean {meant}?" if meant else ""
    detail = f"{quoted(path + name)} is not a field of this API: check its spelling, or leave it out.{question}"
    return invalid(path + name[:FIELD_NAME_CHARACTERS_MAX], detail)


def _is_misspelt(name: str, known: str) -> bool:
    """Whether `name` has a letter or two of `known` wrong. Stricter than difflib: most names are nobody's misspelling.

    `mode` and `tool` are words of their own, so a short name may not lack a letter.
    """
    if len(known) < _ONE_EDIT_LENGTH or (len(known) == _ONE_EDIT_LENGTH and len(name) < len(known)):
        return False
    edits_max = 2 if len(known) >= _TWO_EDITS_LENGTH else 1
    if abs(len(name) - len(known)) > edits_max or len(set(name) ^ set(known)) > 2 * edits_max:
        return False  # Counting edits takes a hundred times as long.
    return _edits(name, known) <= edits_max


def _edits(name: str, known: str) -> int:
    """How many letters were added, left out, changed, or swapped with the next one."""
    before, last = [0], list(range(len(known) + 1))
    for i, letter in enumerate(name, 1):
        row = [i]
        for j, other in enumerate(known, 1):
            row.append(min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (letter != other)))
            if i > 1 and j > 1 and letter == known[j - 2] and name[i - 2] == other:
                row[j] = min(row[j], before[j - 2] + 1)
        before, last = last, row
    return last[-1]


def _plain(name: str) -> str:
    """`maxTokens` and `Max-Tokens` are spellings of `max_tokens`."""
    return name.lower().replace("_", "").replace("-", "")
