"""When to send again: full jitter between attempts, within the deadline, with a bound on the time slept."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """`base_s`, `cap_s`: before retry number n a client sleeps between 0 and min(cap_s, base_s * 2^n) seconds.

    `retries_max`: how many retries may follow each other without an event of the answer. `deadline_s`: of requests
    without a timeout. `sleep_share_max`: how much of its deadline a request may spend asleep. `silence_s_max`: how
    long a stream may be without a byte before its server counts as lost; None: the read timeout.
    """

    base_s: float = 0.25
    cap_s: float = 8.0
    retries_max: int = 20
    deadline_s: float = 600.0
    sleep_share_max: float = 0.4
    silence_s_max: float | None = None


class Retries:
    """The retries of one request."""

    def __init__(
        self,
        policy: RetryPolicy,
        timeout_s: float | None,
        *,
        is_absolute: bool = False,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """`is_absolute`: the deadline stays where it is; otherwise it counts anew from each event of the answer."""
        self._policy = policy
        self._timeout_s = policy.deadline_s if timeout_s is None else timeout_s
        self._is_absolute = is_absolute
        self._clock = clock
        self._draw = draw
        self._deadline = clock() + self._timeout_s
        self._slept_s = 0.0
        self._count = 0

    @property
    def remaining_s(self) -> float:
        """The time until the deadline."""
        return self._deadline - self._clock()

    def progressed(self) -> None:
        """A part of the answer has arrived."""
        self._count = 0
        if not self._is_absolute:
            self._deadline = self._clock() + self._timeout_s

    def pause_s(self, *, at_least_s: float = 0.0, free_count: int = 0) -> float | None:
        """How long to sleep before the next attempt; None: give up.

        `at_least_s`: what the server asks for. `free_count`: the first retries, which need no pause, as each goes to
        another server.
        """
        policy = self._policy
        if self._count >= policy.retries_max:
            return None
        jitter_s = self._draw() * min(policy.cap_s, policy.base_s * 2.0**self._count)
        pause_s = max(at_least_s, 0.0 if self._count < free_count else jitter_s)
        if self._slept_s + pause_s > policy.sleep_share_max * self._timeout_s or pause_s >= self.remaining_s:
            return None
        self._count += 1
        self._slept_s += pause_s
        return pause_s
