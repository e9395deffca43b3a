"""Loop has a clock as precise as asyncio's, and its timers never fire early."""

import asyncio
import time
from math import inf

import pytest

from services.runtime.loop import Loop, run_on_loop


def test_loop_time_has_a_resolution_below_100_microseconds() -> None:
    async def scenario() -> float:
        clock = asyncio.get_running_loop().time
        began = clock()
        while (now := clock()) == began:
            pass
        return now - began

    assert run_on_loop(scenario()) < 1e-4


@pytest.mark.parametrize("delay_s", [0.0002, 0.0012, 0.0016])
def test_timer_never_fires_early(delay_s: float) -> None:
    """In whichever fraction of a millisecond it is set, and however often the loop polls meanwhile."""

    async def wait(began: float) -> bool:
        loop = asyncio.get_running_loop()
        fired: list[float] = []
        loop.call_at(began + delay_s, lambda: fired.append(loop.time()))
        while not fired:
            await asyncio.sleep(0)
        return fired[0] >= began + delay_s

    async def scenario() -> list[bool]:
        return [await wait(time.monotonic()) for _ in range(50)]

    assert all(run_on_loop(scenario()))


def test_deadline_has_passed_when_its_timeout_fires() -> None:
    async def scenario() -> list[bool]:
        loop, passed = asyncio.get_running_loop(), []
        for microseconds in range(1000, 2000, 50):
            deadline = loop.time() + microseconds * 1e-6
            try:
                async with asyncio.timeout_at(deadline):
                    await asyncio.Event().wait()
            except TimeoutError:
                passed.append(loop.time() >= deadline)
        return passed

    assert run_on_loop(scenario()) == [True] * 20


@pytest.mark.parametrize("delay_s", [0, -1])
def test_callback_that_is_due_already_runs_in_the_next_iteration(delay_s: float) -> None:
    async def scenario() -> list[str]:
        called: list[str] = []
        asyncio.get_running_loop().call_later(delay_s, called.append, "late")
        await asyncio.sleep(0)
        return called

    assert run_on_loop(scenario()) == ["late"]


def test_infinite_delay_is_accepted() -> None:
    async def scenario() -> None:
        asyncio.get_running_loop().call_later(inf, print).cancel()
        async with asyncio.timeout(inf):
            await asyncio.sleep(0)

    run_on_loop(scenario())


def test_run_on_loop_returns_the_result_and_raises_the_exception() -> None:
    async def answer() -> object:
        return asyncio.get_running_loop()

    async def fail() -> None:
        raise ValueError("as it should")

    assert isinstance(run_on_loop(answer()), Loop)
    with pytest.raises(ValueError, match="as it should"):
        run_on_loop(fail())
