"""At most STARTS_MAX requests start in one iteration of the event loop, in the order in which they came."""

import asyncio

from services.http.server.turn_limits import FRAMES_A_TURN_MAX, STARTS_MAX, FrameLimiter, StartLimiter
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


def test_frames_of_all_connections_share_an_iteration() -> None:
    async def test() -> None:
        limiter, turns = FrameLimiter(), 0
        handled: list[tuple[str, int]] = []

        def handle(name: str) -> None:
            handled.append((name, turns))
            limiter.spend(FRAMES_A_TURN_MAX // 2)

        for name in "abcde":
            limiter.wait(lambda name=name: handle(name))  # type: ignore[misc]
        for _ in range(4):
            turns += 1
            await asyncio.sleep(0)

        assert handled == [("a", 1), ("b", 1), ("c", 2), ("d", 2), ("e", 3)]

    run_async(test())


def test_frame_that_costs_much_leaves_nothing_of_its_iteration_and_all_of_the_next() -> None:
    async def test() -> None:
        limiter = FrameLimiter()

        limiter.spend(10 * FRAMES_A_TURN_MAX)

        assert limiter.left < 0
        await asyncio.sleep(0)
        assert limiter.left == FRAMES_A_TURN_MAX

    run_async(test())


def test_connection_that_waits_again_waits_for_the_next_iteration() -> None:
    async def test() -> None:
        limiter, turns = FrameLimiter(), 0
        seen: list[int] = []

        def handle() -> None:
            seen.append(turns)
            limiter.spend(1)
            if len(seen) < 3:
                limiter.wait(handle)

        limiter.wait(handle)
        for _ in range(5):
            turns += 1
            await asyncio.sleep(0)

        assert seen == [1, 2, 3]

    run_async(test())
