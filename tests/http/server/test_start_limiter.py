"""At most STARTS_MAX requests start in one iteration of the event loop, in the order in which they came."""

import asyncio

from services.http.server.start_limiter import STARTS_MAX, StartLimiter
from tests.support.doubles import run_async


def test_each_iteration_starts_a_few_requests_in_order() -> None:
    async def test() -> None:
        start_limiter, started = StartLimiter(), []
        count = 3 * STARTS_MAX + 1
        for number in range(count):
            start_limiter.start(lambda number=number: started.append(number))  # type: ignore[misc]
        seen = [len(started)]
        while len(started) < count:
            await asyncio.sleep(0)
            seen.append(len(started))

        assert seen == [STARTS_MAX, 2 * STARTS_MAX, 3 * STARTS_MAX, count]
        assert started == list(range(count))

    run_async(test())


def test_later_request_starts_after_those_that_wait() -> None:
    async def test() -> None:
        start_limiter, started = StartLimiter(), []
        for _ in range(2 * STARTS_MAX):
            start_limiter.start(lambda: started.append("early"))
        await asyncio.sleep(0)
        start_limiter.start(lambda: started.append("late"))
        await asyncio.sleep(0)

        assert started == ["early"] * 2 * STARTS_MAX + ["late"]

    run_async(test())


def test_next_iteration_starts_requests_at_once() -> None:
    async def test() -> None:
        start_limiter, started = StartLimiter(), []
        for _ in range(3):
            start_limiter.start(lambda: started.append("one"))
            assert started.pop() == "one"
            await asyncio.sleep(0)

    run_async(test())
