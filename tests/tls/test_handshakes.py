"""Handshakes are bounded in number, in time, and in what they take of one iteration of the event loop."""

import asyncio

import pytest

from services.tls import handshakes as module
from services.tls.handshakes import HANDSHAKE_S_MAX, Handshakes
from tests.support.clock import pass_time, run_clocked, settle


class Pending:
    """Records why it was closed."""

    def __init__(self, handshakes: Handshakes) -> None:
        self.why = ""
        self._handshakes = handshakes
        handshakes.begin(self)

    def expire(self, why: str) -> None:
        self.why = why
        self._handshakes.end(self)


def test_oldest_is_closed_for_one_more_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HANDSHAKES_MAX", 2)

    async def test() -> None:
        handshakes = Handshakes()
        first, second, third = (Pending(handshakes) for _ in range(3))

        assert first.why == "more than 2 handshakes are under way"
        assert not second.why
        assert not third.why
        assert len(handshakes) == 2

    run_clocked(test())


def test_handshake_is_closed_after_its_time_and_not_if_it_has_ended() -> None:
    async def test() -> None:
        handshakes = Handshakes()
        slow, done = Pending(handshakes), Pending(handshakes)
        handshakes.end(done)
        handshakes.end(done)
        pass_time(HANDSHAKE_S_MAX)
        await settle()

        assert slow.why == "the handshake took longer than 10 s"
        assert not done.why

    run_clocked(test())


def test_close_closes_those_under_way() -> None:
    async def test() -> None:
        handshakes = Handshakes()
        one = Pending(handshakes)
        handshakes.close()

        assert one.why == "the server closes"

    run_clocked(test())


def test_iteration_has_few_steps_if_they_are_expensive_and_the_rest_follow_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(module, "clock", lambda: now)

    async def test() -> None:
        nonlocal now
        handshakes, done = Handshakes(), []

        def step(number: int) -> None:
            nonlocal now
            done.append(number)
            now += module.HANDSHAKE_TURN_S / 2

        for number in range(5):
            handshakes.step(lambda number=number: step(number))  # type: ignore[misc]
        seen = []
        while len(done) < 5:
            await asyncio.sleep(0)
            seen.append(len(done))

        assert done == [0, 1, 2, 3, 4]
        assert [count for count in dict.fromkeys(seen) if count] == [2, 4, 5]

    run_clocked(test())


def test_step_that_raises_does_not_stop_the_others() -> None:
    async def test() -> None:
        faults: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context.get("exception")))
        handshakes, done = Handshakes(), []

        def faulty() -> None:
            raise ZeroDivisionError

        handshakes.step(faulty)
        handshakes.step(lambda: done.append(1))
        await settle()

        assert done == [1]
        assert [type(fault) for fault in faults] == [ZeroDivisionError]

    run_clocked(test())
