"""The event loop that every process runs on: uvloop's, with asyncio's clock, and timers that are never early."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextvars import Context
from math import ceil
from typing import Any, TypeVar, TypeVarTuple

import uvloop

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

clock = time.monotonic
"""That of every loop. To ask the running one for it is a system call, before Python 3.12."""
EXACT_S_MAX = 86_400.0
"""Of a timer that is set for later than that nobody asks for the millisecond."""


class Loop(uvloop.Loop):
    """For `asyncio.Runner(loop_factory=Loop)`.

    uvloop's own clock counts whole milliseconds, by which nothing can be measured that takes microseconds. And it
    rounds a delay to the nearest one, so its timers fire up to 1.5 ms early: whoever is woken by a deadline, and asks
    whether it has passed, would be told that it has not.
    """

    time = staticmethod(clock)  # The clock that libuv rounds down: clock_gettime(2), CLOCK_MONOTONIC.

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """uvloop's `call_at` comes here as well."""
        if 0 < delay < EXACT_S_MAX:
            delay = ceil((self.time() - super().time() + delay) * 1000) / 1000
        return super().call_later(delay, callback, *args, context=context)


def run_on_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, on such a loop."""
    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(coroutine)
