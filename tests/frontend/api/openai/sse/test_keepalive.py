"""Keepalive: every pause of a stream is noticed, with one timer for the whole stream."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from services.core.interface import Delta
from services.frontend.api.openai.sse.keepalive import Keepalive
from tests.support.clock import pass_time, run_clocked, settle

PAUSE_S = 10.0


class Watched:
    """A stream whose deltas are events if they have text. `pauses`: the times of the pauses that were noticed."""

    def __init__(self) -> None:
        self.pauses: list[float] = []
        loop = asyncio.get_running_loop()
        self.keepalive = Keepalive(PAUSE_S, lambda: self.pauses.append(loop.time()))
        self._events_of = self.keepalive.noting(lambda delta: delta.text.encode())

    def deliver(self, text: str) -> bytes:
        return self._events_of(Delta(0, [1], text))


async def wait(seconds: int) -> None:
    for _ in range(seconds):
        pass_time(1)
        await settle()


def pauses_of(play: Coroutine[Any, Any, Watched]) -> list[float]:
    return run_clocked(play).pauses


def test_every_pause_of_a_silent_stream_is_noticed() -> None:
    async def play() -> Watched:
        watched = Watched()
        await wait(35)
        return watched

    assert pauses_of(play()) == [10, 20, 30]


def test_pause_counts_from_the_last_event_and_not_from_the_last_delta() -> None:
    async def play() -> Watched:
        watched = Watched()
        await wait(9)
        assert watched.deliver("a") == b"a"
        await wait(9)
        assert watched.pauses == []
        assert watched.deliver("") == b""
        await wait(2)
        return watched

    assert pauses_of(play()) == [19]


def test_events_set_no_timer() -> None:
    async def play() -> Watched:
        watched = Watched()
        timer = watched.keepalive._timer
        for _ in range(5):
            watched.deliver("a")
            await wait(1)
        assert watched.keepalive._timer is timer
        return watched

    assert pauses_of(play()) == []


def test_after_stop_no_pause_is_noticed_and_no_timer_is_left() -> None:
    async def play() -> Watched:
        watched = Watched()
        await wait(10)
        watched.keepalive.stop()
        await wait(25)
        watched.deliver("a")
        assert watched.keepalive._timer.cancelled()
        return watched

    assert pauses_of(play()) == [10]
