"""Ends an engine that may not want to end: nothing here waits for it without a bound.

Its shutdown waits for its processes, of which one may be dead or stuck. A call into it can hold up the event loop, and
then nothing that the loop does can help. And what it has registered for the interpreter's exit may wait for ever, too,
which is why the process is left by `os._exit`: see `exiting_at_once` in services/runtime/process.py.
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

log = structlog.get_logger()

TICK_S = 1.0
EXIT_STUCK = 1


def begin_shutdown(llm: Any, on_end: Callable[[], None] = lambda: None) -> None:
    """In a thread that nobody has to wait for. on_end: called in it, however it ends."""

    def work() -> None:
        try:
            llm.shutdown()
        except Exception as error:
            log.warning("the engine could not be shut down", why=str(error))
        finally:
            on_end()

    threading.Thread(target=work, name="trtllm-shutdown", daemon=True).start()


async def shut_down(llm: Any, limit_s: float) -> None:
    """Shut it down, or leave it behind after `limit_s`."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def tell() -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(ended.set)

    begin_shutdown(llm, tell)
    try:
        async with asyncio.timeout(limit_s):
            await ended.wait()
    except TimeoutError:
        log.warning("the engine does not shut down: leaving it behind", waited_s=limit_s)


@contextmanager
def exiting_on_signals() -> Iterator[None]:
    """While the event loop is held up by loading: whoever wants the process to end need not wait for minutes.

    Nothing is served yet, so there is nothing to finish.
    """

    def leave(number: int, _: FrameType | None) -> None:
        print(f"leaving while the model is being loaded: {signal.Signals(number).name}", file=sys.stderr, flush=True)
        os._exit(EXIT_FORCED)

    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, leave) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _exit_stuck(silent_s: float) -> None:
    log.error("the event loop is stuck in a call into the engine: exiting", silent_s=silent_s)
    os._exit(EXIT_STUCK)


class LoopWatch:
    """A thread that ends the process when the event loop has stood still for `limit_s`.

    It counts its own looks, not the clock, so a process that was stopped (SIGSTOP) as a whole is not taken for stuck.
    """

    def __init__(self, limit_s: float, on_stuck: Callable[[float], None] = _exit_stuck, tick_s: float = TICK_S) -> None:
        self._limit_s = limit_s
        self._on_stuck = on_stuck
        self._tick_s = tick_s
        self._beats = 0
        self._is_over = threading.Event()

    def __enter__(self) -> None:
        """Watch the loop that runs, from now on."""
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
        seen, looks = -1, 0
        while not self._is_over.is_set():
            seen, looks = (seen, looks + 1) if self._beats == seen else (self._beats, 0)
            if looks * self._tick_s >= self._limit_s:
                self._on_stuck(looks * self._tick_s)
                return
            time.sleep(self._tick_s)
