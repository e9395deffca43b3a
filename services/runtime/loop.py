"""The event loop of every process: uvloop with asyncio's clock, and with timers that never fire early."""

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
"""The clock of every loop. Before Python 3.12, asking for the running loop costs a system call."""
EXACT_S_MAX = 86_400.0
"""Longer timers are not rounded up to the millisecond."""


class Loop(uvloop.Loop):
    """A uvloop with a precise clock, for `asyncio.Runner(loop_factory=Loop)`.

    uvloop's own clock counts whole milliseconds, which is too coarse to measure microseconds. It also rounds a delay to
    the nearest millisecond, so its timers fire up to 1.5 ms early: a task that is woken by its deadline would find that
    the deadline has not passed.
    """

    time = staticmethod(clock)  # The clock that libuv rounds down: clock_gettime(2), CLOCK_MONOTONIC.

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Round the delay up to a millisecond of uvloop's clock. uvloop's `call_at` calls this method, too."""
        if 0 < delay < EXACT_S_MAX:
            delay = ceil((self.time() - super().time() + delay) * 1000) / 1000
        return super().call_later(delay, callback, *args, context=context)


def run_on_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine on a Loop, as `asyncio.run` does."""
    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(coroutine)
