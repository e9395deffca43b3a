"""BoundedExecutor: long computations run in threads, and never more of them than there are places."""

import asyncio
import threading
from typing import Any

import pytest

from services.core.bounded_executor import BYTES_MAX, BoundedExecutor
from services.core.errors import Failure, Reason
from tests.support.clock import WAIT_S
from tests.support.doubles import run_async


def refuse() -> None:
    raise ValueError("as scripted")


def test_a_function_runs_in_a_thread_and_its_result_is_returned() -> None:
    async def scenario() -> tuple[int, int]:
        return await BoundedExecutor().run(threading.get_ident), await BoundedExecutor().run(max, 3, 4)

    thread, result = run_async(scenario())

    assert thread != threading.get_ident()
    assert result == 4


def test_the_exception_of_a_function_is_raised() -> None:
    with pytest.raises(ValueError, match="as scripted"):
        run_async(BoundedExecutor().run(refuse))


def test_a_call_without_a_place_is_refused_until_a_place_is_free() -> None:
    async def scenario() -> Failure:
        executor, may_end = BoundedExecutor(places=2), threading.Event()
        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(executor.run(may_end.wait, WAIT_S))
            await asyncio.sleep(0)
            with pytest.raises(Failure) as caught:
                await executor.run(max, 1, 2)
            may_end.set()
        assert await executor.run(max, 1, 2) == 2
        return caught.value

    failure = run_async(scenario())

    assert failure.reason is Reason.OVERLOADED
    assert failure.metadata == {"cause": "preparation"}
    assert failure.retry_after_s


def test_bytes_that_run_and_wait_are_bounded_but_one_input_may_have_any_size() -> None:
    async def scenario() -> Failure:
        executor, may_end = BoundedExecutor(), threading.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(executor.run(may_end.wait, WAIT_S, size=BYTES_MAX + 1))
            await asyncio.sleep(0)
            with pytest.raises(Failure) as caught:
                await executor.run(max, 1, 2, size=1)
            may_end.set()
        assert await executor.run(max, 1, 2, size=BYTES_MAX) == 2
        return caught.value

    assert run_async(scenario()).reason is Reason.OVERLOADED


def test_functions_run_one_after_another_in_one_thread() -> None:
    """A bug: eight large bodies held eight threads, which all delayed the event loop."""

    async def scenario() -> set[int]:
        executor = BoundedExecutor()
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(executor.run(threading.get_ident)) for _ in range(8)]
        return {task.result() for task in running}

    assert len(run_async(scenario())) == 1


def test_the_place_of_a_cancelled_caller_stays_taken_until_its_thread_is_done(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        executor, begun, may_end = BoundedExecutor(places=1), threading.Event(), threading.Event()

        def hold() -> None:
            begun.set()
            may_end.wait(WAIT_S)
            raise ValueError("the caller is gone")

        async with asyncio.TaskGroup() as group:
            asking: asyncio.Task[Any] = group.create_task(executor.run(hold))
            while not begun.is_set():
                await asyncio.sleep(0)
            asking.cancel()
        with pytest.raises(Failure):
            await executor.run(max, 1, 2)
        may_end.set()
        while True:
            try:
                await executor.run(max, 1, 2)
                break
            except Failure:
                await asyncio.sleep(0.001)

    run_async(scenario())
    assert not caplog.records
