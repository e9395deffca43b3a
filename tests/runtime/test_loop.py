"""Loop: time is as fine as asyncio's, and no timer fires before its time."""

import asyncio
import time
from math import inf

import pytest

from services.runtime.loop import Loop, run_on_loop


def test_time_is_finer_than_what_is_measured_with_it() -> None:
    async def scenario() -> float:
        clock = asyncio.get_running_loop().time
        began = clock()
        while (now := clock()) == began:
            pass
        return now - began

    assert run_on_loop(scenario()) < 1e-4


@pytest.mark.parametrize("delay_s", [0.0002, 0.0012, 0.0016])
def test_no_timer_fires_before_its_time(delay_s: float) -> None:
    """In whatever part of a millisecond it is set, and however often the loop looks meanwhile."""

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


def test_who_is_woken_by_a_deadline_finds_that_it_has_passed() -> None:
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
def test_what_is_due_already_is_called_in_the_next_turn(delay_s: float) -> None:
    async def scenario() -> list[str]:
        called: list[str] = []
        asyncio.get_running_loop().call_later(delay_s, called.append, "late")
        await asyncio.sleep(0)
        return called

    assert run_on_loop(scenario()) == ["late"]


def test_what_is_due_never_may_be_waited_for() -> None:
    async def scenario() -> None:
        asyncio.get_running_loop().call_later(inf, print).cancel()
        async with asyncio.timeout(inf):
            await asyncio.sleep(0)

    run_on_loop(scenario())


def test_run_returns_what_the_coroutine_does_and_raises_what_it_raises() -> None:
    async def answer() -> object:
        return asyncio.get_running_loop()

    async def fail() -> None:
        raise ValueError("as it should")

    assert isinstance(run_on_loop(answer()), Loop)
    with pytest.raises(ValueError, match="as it should"):
        run_on_loop(fail())
