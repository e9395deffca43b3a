"""Fixtures for the tests of the llama.cpp engine: one engine for each module, because loading it takes seconds."""

import asyncio
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from services.runtime.loop import Loop
from tests.support.clock import WAIT_S

if TYPE_CHECKING:
    from tests.worker.engines.llamacpp.support import Bench


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=Loop) as runner:
        yield runner


@pytest.fixture(scope="module")
def bench(runner: asyncio.Runner) -> Iterator["Bench"]:
    from tests.worker.engines.llamacpp.support import Bench  # Needs the extra `llamacpp`.

    async def start() -> tuple["Bench", asyncio.Task[None]]:
        bench, ready = Bench(), asyncio.Event()
        task = asyncio.create_task(bench.engine.run(bench.emit, ready))
        async with asyncio.timeout(WAIT_S):
            await ready.wait()
        return bench, task

    async def end(task: asyncio.Task[None]) -> None:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    bench, task = runner.run(start())
    yield bench
    runner.run(end(task))
    assert all(thread.name != "llamacpp" for thread in threading.enumerate())
