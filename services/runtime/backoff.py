"""Exponential back-off with full jitter, so that clients do not all retry at the same time."""

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Delays between tries. The delay before try n, counted from 0, is uniform in [0, min(`cap_s`, `base_s` · 2ⁿ)].

    Source: "full jitter" in Marc Brooker's "Exponential Backoff and Jitter".
    """

    base_s: float = 0.05
    cap_s: float = 2.0

    def delay_s(self, tries: int, rng: random.Random) -> float:
        return rng.uniform(0, min(self.cap_s, self.base_s * 2 ** min(tries, 32)))
