"""Runs a process: one event loop, one root task, a stop on SIGTERM or SIGINT, and an immediate exit on a second one."""

import asyncio
import os
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import structlog

from services.runtime import gc_control
from services.runtime.descriptors.limit import raise_limit
from services.runtime.loop import run_on_loop
from services.runtime.tasks import leaf_of

log = structlog.get_logger()

EXIT_FORCED = 130


class StartupError(Exception):
    """The process cannot start. The message is one sentence that says what is wrong and what to do."""


def run_process(main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Run `main(stopping)` until it returns. SIGTERM or SIGINT sets `stopping`; a second signal exits at once.

    The process may have as many open files as the system allows. `main` stops in order by itself: report not ready →
    accept nothing new → finish what runs → close. A StartupError is printed as one sentence, with exit status 1.
    """
    raise_limit()
    gc_control.take_over()
    try:
        run_on_loop(_with_signals(main))
    except (StartupError, ExceptionGroup) as error:
        cause = leaf_of(error)
        if not isinstance(cause, StartupError):
            raise
        print(f"error: {cause}", file=sys.stderr)
        sys.exit(1)


@contextmanager
def exiting_at_once() -> Iterator[None]:
    """End the process at the end of the block, with the usual exit status, but without running exit handlers.

    For libraries whose exit handlers may wait forever.
    """
    status = 0
    try:
        yield
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # The reader is gone.
            stream.flush()
    os._exit(status)


async def _with_signals(main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    stopping = asyncio.Event()

    def on_signal(name: str) -> None:
        if stopping.is_set():
            log.warning("exiting at once", signal=name)
            os._exit(EXIT_FORCED)
        log.info("stopping", signal=name, second_signal="exits at once")
        stopping.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number.name)
    async with asyncio.TaskGroup() as group:
        collecting = group.create_task(gc_control.collect_when_quiet())
        await main(stopping)
        collecting.cancel()


def write_atomically(path: Path, text: str) -> None:
    """Replace a ready file so that a reader sees either the old text or the new one. Raises StartupError."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_text(text)
        scratch.replace(path)
    except OSError as error:
        raise StartupError(
            f"cannot write the ready file {path}: {error.strerror}; give another --ready-file"
        ) from error
