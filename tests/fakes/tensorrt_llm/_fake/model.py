"""A language model without a sense: how likely each token is follows from all tokens before it.

Text is likely: after the first byte of a character of two bytes comes the second; end tokens come as often as asked.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .vocabulary import Vocabulary

RIVAL_COUNT = 8
"""Tokens that are likely at a time."""
REST_LOGIT = -16.0
"""Of all the others: below it by up to one, each by its own part."""

_MASK = (1 << 64) - 1
_LEAD = 0xC3
_FOLLOW = range(0xA0, 0xC0)


def _mixed(value: int) -> int:
    """A hash of 64 bits: the finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


@dataclass(frozen=True, slots=True)
class State:
    """A text so far: the hash over its tokens, and the last of them."""

    value: int = 0
    last: int = -1

    def after(self, token_ids: Iterable[int]) -> "State":
        value, last = self.value, self.last
        for last in token_ids:
            value = _mixed(value * 0x9E3779B97F4A7C15 + last + 1 & _MASK)
        return State(value, last)


class Model:
    """One for all requests: it remembers none."""

    def __init__(self, vocabulary: Vocabulary, end_odds: int) -> None:
        self.vocabulary = vocabulary
        self._end_odds = end_odds
        special = set(vocabulary.end_ids)
        self._is_bytes = len(vocabulary.token_bytes[_LEAD]) == 1 and vocabulary.token_bytes[_LEAD][0] == _LEAD
        self._usual = [
            token
            for token, content in enumerate(vocabulary.token_bytes)
            if token not in special and (content.isascii() and content.decode().isprintable() and content)
        ] + ([_LEAD] if self._is_bytes else [])

    def likely(self, state: State) -> dict[int, float]:
        """The likeliest tokens and their logits, the likeliest first."""
        is_inside = self._is_bytes and state.last == _LEAD
        usual: Sequence[int] = _FOLLOW if is_inside else self._usual
        start = state.value >> 16
        rivals = [usual[(start + index) % len(usual)] for index in range(min(RIVAL_COUNT, len(usual)))]
        if self._end_odds and not is_inside and state.value % self._end_odds == 0:
            rivals.insert(0, self.vocabulary.end_ids[start % len(self.vocabulary.end_ids)])
        spread = (state.value & 0xFF) / 256
        return {token: -rank * (0.5 + spread) for rank, token in enumerate(rivals)}

    def among(self, state: State, allowed: Iterable[int]) -> dict[int, float]:
        """Logits of the tokens that are allowed: each token's is the same whatever else is allowed."""
        likely = self.likely(state)
        return {token: likely.get(token, _rest_logit(state, token)) for token in allowed}

    def normaliser(self, likely: Mapping[int, float]) -> float:
        """log Σ exp(logit), taking each of the unlikely ones for REST_LOGIT."""
        rest = (len(self.vocabulary.token_bytes) - len(likely)) * math.exp(REST_LOGIT)
        return math.log(sum(map(math.exp, likely.values())) + rest)


def _rest_logit(state: State, token: int) -> float:
    return REST_LOGIT - _mixed(state.value ^ token * 0x9E3779B97F4A7C15 & _MASK) / _MASK
