"""How long to wait before trying again: exponential with full jitter, so that clients do not come back all at once."""

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """The wait before try n (from 0) is drawn evenly from 0 to `base_s` times 2 to the n, at most `cap_s`.

    Source: "full jitter" in Marc Brooker's "Exponential Backoff and Jitter".
    """

    base_s: float = 0.05
    cap_s: float = 2.0

    def delay_s(self, tries: int, rng: random.Random) -> float:
        return rng.uniform(0, min(self.cap_s, self.base_s * 2 ** min(tries, 32)))
