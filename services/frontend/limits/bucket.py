"""A token bucket: what comes at a steady rate is saved up for at most a minute.

| what | effect |
| --- | --- |
| `take`, there is one or more | less is left, or a debt; what comes then pays the debt first |
| `promise_s`, there is less than one | when one more will have come, after those that were told a time before |
| the rate changes | what is left changes in proportion, a debt does not |
"""

from random import Random

WINDOW_S = 60.0
"""Rates are per minute, and a bucket holds what comes in one."""
LEAST = 1.0
"""There must be one to take some, and a bucket holds at least one, however small the rate."""


class Bucket:
    """What is left of a rate. A new bucket is full. `now`: in event-loop time."""

    __slots__ = ("_at", "_capacity", "_left", "_per_minute", "_promised")

    def __init__(self, per_minute: float, now: float) -> None:
        self._per_minute = per_minute
        self._capacity = max(per_minute, LEAST)
        self._left = self._capacity
        self._at = self._promised = now

    def left(self, per_minute: float, now: float) -> float:
        """How many there are now; negative: how many must come first."""
        capacity = max(per_minute, LEAST)
        if capacity != self._capacity:
            if self._left > 0:
                self._left *= capacity / self._capacity
            self._capacity = capacity
        self._per_minute = per_minute
        self._left = min(self._left + max(now - self._at, 0.0) * per_minute / WINDOW_S, capacity)
        self._at = now
        return self._left

    def take(self, count: float) -> None:
        """Take some, as of the last look, whether there are as many or not. Negative: give back."""
        self._left = min(self._left - count, self._capacity)

    def promise_s(self, per_minute: float, now: float, rng: Random) -> float:
        """When one more can be taken, for somebody who gets none now: after all others who were told a time.

        Nobody is told a longer time than it takes to pay the debt, or WINDOW_S: many may never come back, and then
        their turns go to others.
        """
        wait_s = max(LEAST - self.left(per_minute, now), 0.0) * WINDOW_S / per_minute
        due_s = max(wait_s, self._promised + WINDOW_S / per_minute - now)
        if due_s > max(wait_s, WINDOW_S):
            return max(wait_s, rng.uniform(WINDOW_S / 2, WINDOW_S))
        self._promised = now + due_s
        return due_s

    def reset_s(self, per_minute: float, now: float) -> float:
        """How long until the bucket is full, if nothing is taken."""
        return (self._capacity - self.left(per_minute, now)) * WINDOW_S / per_minute

    def is_full(self, now: float) -> bool:
        """Whether a new one would be the same."""
        return self.left(self._per_minute, now) >= self._capacity
