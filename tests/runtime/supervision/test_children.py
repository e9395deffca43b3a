"""Several children start and stop together; a failure or an early stop ends the start of all."""

import asyncio
from pathlib import Path

import pytest

from services.runtime.loop import run_on_loop
from services.runtime.process import StartupError
from services.runtime.supervision.children import start_all, start_until, stop_all
from services.runtime.tasks import leaf_of
from tests.runtime.supervision.support import EXITS, NEVER_READY, SERVES, Supervised, is_alive
from tests.support.clock import WAIT_S


def test_start_all_returns_when_every_child_serves_and_stop_all_when_every_child_has_exited(tmp_path: Path) -> None:
    supervised = [Supervised(tmp_path, SERVES, name) for name in ("one", "other")]
    children = [one.child for one in supervised]

    async def scenario() -> list[int | None]:
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
            await start_all(children, group)
            pids = [one.pid for one in supervised]
            await stop_all(children)
        return pids

    pids = run_on_loop(scenario())

    assert None not in pids
    assert not any(is_alive(pid) for pid in pids if pid is not None)


def test_start_all_raises_the_error_of_the_child_that_failed(tmp_path: Path) -> None:
    children = [Supervised(tmp_path, NEVER_READY, "one").child, Supervised(tmp_path, EXITS, "other").child]

    async def scenario() -> None:
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
            try:
                await start_all(children, group)
            finally:
                await stop_all(children)

    with pytest.raises(ExceptionGroup) as caught:
        run_on_loop(scenario())

    assert isinstance(error := leaf_of(caught.value), StartupError)
    assert str(error).startswith("other exited with status 3")


def test_start_until_cancels_a_start_that_still_runs_when_stopping_is_set() -> None:
    async def scenario() -> list[str]:
        stopping, steps = asyncio.Event(), []

        async def start() -> None:
            try:
                stopping.set()
                await asyncio.Event().wait()
            finally:
                steps.append("cancelled")

        await start_until(stopping, start())
        return steps

    assert run_on_loop(scenario()) == ["cancelled"]


def test_start_until_waits_for_stopping_after_the_start_has_finished() -> None:
    async def scenario() -> bool:
        stopping = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(start_until(stopping, asyncio.sleep(0)))
            for _ in range(5):
                await asyncio.sleep(0)
            was_done = running.done()
            stopping.set()
        return was_done

    assert not run_on_loop(scenario())
