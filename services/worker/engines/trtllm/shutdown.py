"""Shuts down an engine that may hang: every wait for it here is bounded.

The engine's shutdown waits for its processes, one of which may be dead or stuck. A call into the engine can block the
event loop, and then no task on the loop can help. Its handlers for the interpreter's exit may also wait for ever, so
the process ends by `os._exit`: see `exiting_at_once` in services/runtime/process.py.
"""

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import structlog

from services.runtime.process import EXIT_FORCED
from services.runtime.tasks import wait_event

log = structlog.get_logger()

TICK_S = 1.0
EXIT_STUCK = 1


def begin_shutdown(llm: Any, on_end: Callable[[], None] = lambda: None) -> None:
    """Shut the engine down in a daemon thread. `on_end`: called in that thread, however the shutdown ends."""

    def work() -> None:
        try:
            llm.shutdown()
        except Exception as error:
            log.warning("engine shutdown failed", why=str(error))
        finally:
            on_end()

    threading.Thread(target=work, name="trtllm-shutdown", daemon=True).start()


async def shut_down(llm: Any, limit_s: float) -> None:
    """Shut the engine down, waiting at most `limit_s`."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def set_ended() -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(ended.set)

    begin_shutdown(llm, set_ended)
    if not await wait_event(ended, limit_s):
        log.warning("engine shutdown timed out, continuing without it", waited_s=limit_s)


@contextmanager
def exiting_on_signals() -> Iterator[None]:
    """Exit at once on SIGTERM and SIGINT, while loading blocks the event loop for minutes.

    No request is served yet, so there is nothing to finish.
    """

    def leave(number: int, _: FrameType | None) -> None:
        print(f"exiting during model loading: {signal.Signals(number).name}", file=sys.stderr, flush=True)
        os._exit(EXIT_FORCED)

    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, leave) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _exit_stuck(silent_s: float) -> None:
    log.error("the event loop is stuck in a call into the engine, exiting", silent_s=silent_s)
    os._exit(EXIT_STUCK)


class LoopWatch:
    """A watchdog thread that ends the process once the event loop has been blocked for `limit_s`.

    It counts its own ticks and does not read a clock, so a process that was stopped (SIGSTOP) does not count as stuck.
    """

    def __init__(self, limit_s: float, on_stuck: Callable[[float], None] = _exit_stuck, tick_s: float = TICK_S) -> None:
        self._limit_s = limit_s
        self._on_stuck = on_stuck
        self._tick_s = tick_s
        self._beats = 0
        self._is_over = threading.Event()

    def __enter__(self) -> None:
        """Start watching the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._beat()
        threading.Thread(target=self._watch, name="trtllm-loop-watch", daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()

    def _beat(self) -> None:
        self._beats += 1
        if not self._is_over.is_set():
            self._loop.call_later(self._tick_s, self._beat)

    def _watch(self) -> None:
        seen, ticks = -1, 0  # `ticks`: since the last beat of the loop.
        while not self._is_over.is_set():
            seen, ticks = (seen, ticks + 1) if self._beats == seen else (self._beats, 0)
            if ticks * self._tick_s >= self._limit_s:
                self._on_stuck(ticks * self._tick_s)
                return
            time.sleep(self._tick_s)
