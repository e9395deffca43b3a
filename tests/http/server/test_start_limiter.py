"""Turns: a few begin in a turn of the loop, the others in those after it, and nobody overtakes."""

import asyncio

from services.http.server.start_limiter import BEGUN_MAX, StartLimiter
from tests.support.doubles import run_async


def test_a_few_begin_in_each_turn_in_the_order_they_came() -> None:
    async def test() -> None:
        start_limiter, begun = StartLimiter(), []
        count = 3 * BEGUN_MAX + 1
        for number in range(count):
            start_limiter.take(lambda number=number: begun.append(number))  # type: ignore[misc]
        seen = [len(begun)]
        while len(begun) < count:
            await asyncio.sleep(0)
            seen.append(len(begun))

        assert seen == [BEGUN_MAX, 2 * BEGUN_MAX, 3 * BEGUN_MAX, count]
        assert begun == list(range(count))

    run_async(test())


def test_who_comes_later_stands_behind_those_who_wait() -> None:
    async def test() -> None:
        start_limiter, begun = StartLimiter(), []
        for _ in range(2 * BEGUN_MAX):
            start_limiter.take(lambda: begun.append("early"))
        await asyncio.sleep(0)
        start_limiter.take(lambda: begun.append("late"))
        await asyncio.sleep(0)

        assert begun == ["early"] * 2 * BEGUN_MAX + ["late"]

    run_async(test())


def test_in_a_later_turn_there_is_room_again() -> None:
    async def test() -> None:
        start_limiter, begun = StartLimiter(), []
        for _ in range(3):
            start_limiter.take(lambda: begun.append("one"))
            assert begun.pop() == "one"
            await asyncio.sleep(0)

    run_async(test())
