"""A meaningless language model: the probability of each token is a function of all tokens before it.

Its output is valid text: the second byte of a two-byte character follows the first. `end_odds` sets how often end
tokens occur.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .vocabulary import Vocabulary

RIVAL_COUNT = 8
"""The number of likely tokens."""
REST_LOGIT = -16.0
"""Logits of all other tokens are below this by less than one, each by a different amount."""

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
    """The state of a text: the hash over its tokens, and the last token."""

    value: int = 0
    last: int = -1

    def after(self, token_ids: Iterable[int]) -> "State":
        value, last = self.value, self.last
        for last in token_ids:
            value = _mixed(value * 0x9E3779B97F4A7C15 + last + 1 & _MASK)
        return State(value, last)


class Model:
    """The model. It has no state, so all requests share it."""

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
        """The logits of the allowed tokens. They do not depend on which other tokens are allowed."""
        likely = self.likely(state)
        return {token: likely.get(token, _rest_logit(state, token)) for token in allowed}

    def normaliser(self, likely: Mapping[int, float]) -> float:
        """log Σ exp(logit), with REST_LOGIT as the logit of every unlikely token."""
        rest = (len(self.vocabulary.token_bytes) - len(likely)) * math.exp(REST_LOGIT)
        return math.log(sum(map(math.exp, likely.values())) + rest)


def _rest_logit(state: State, token: int) -> float:
    return REST_LOGIT - _mixed(state.value ^ token * 0x9E3779B97F4A7C15 & _MASK) / _MASK
