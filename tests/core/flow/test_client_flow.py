"""StallWatch: a client that accepts nothing is reported once, in bounded time; one that makes progress is not."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from services.core.flow.client_flow import LOOKS, StallWatch
from tests.support.doubles import run_async

STALL_S_MAX = 0.08


class Client:
    """A client under a watch. `taken`: its progress."""

    def __init__(self, taken: int | None = 0) -> None:
        self.taken = taken
        self.stalls: list[float] = []
        self.has_stalled = asyncio.Event()
        self.looks = asyncio.Queue[None]()
        self.watch = StallWatch(STALL_S_MAX, self._look, self._on_stall)

    def _look(self) -> int | None:
        self.looks.put_nowait(None)
        return self.taken

    def _on_stall(self) -> None:
        self.stalls.append(asyncio.get_running_loop().time())
        self.has_stalled.set()

    async def wait_looks(self, count: int, then: Callable[[], None] = lambda: None) -> None:
        for _ in range(count):
            await self.looks.get()
            then()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def scenario() -> None:
        await test()

    run_async(scenario())


def test_a_client_without_progress_stalls_after_the_bound_and_within_one_look_more() -> None:
    async def test() -> None:
        client, began = Client(), asyncio.get_running_loop().time()
        client.watch.start()
        await client.has_stalled.wait()

        assert client.watch.has_stalled
        assert client.stalls[0] - began >= STALL_S_MAX
        assert client.looks.qsize() <= LOOKS + 2, "a look follows the timer, not the turns of the loop"

    run(test)


def test_a_stall_is_reported_once() -> None:
    async def test() -> None:
        client = Client()
        client.watch.start()
        await client.has_stalled.wait()

        assert client.watch._timer is None
        assert len(client.stalls) == 1

    run(test)


@pytest.mark.parametrize("taken", [0, None], ids=["makes progress", "nothing is unsent"])
def test_a_client_that_makes_progress_or_has_nothing_unsent_does_not_stall(taken: int | None) -> None:
    async def test() -> None:
        client = Client(taken)

        def take() -> None:
            if client.taken is not None:
                client.taken += 1

        client.watch.start()
        await client.wait_looks(3 * LOOKS, take)

        assert not client.stalls
        client.watch.stop()

    run(test)


def test_a_pause_of_this_process_is_not_a_stall_of_the_client() -> None:
    """Bug: after a pause of the process, a client that read all the time was cut off before it was written to again."""

    async def test() -> None:
        client = Client()
        client.watch.start()
        await client.wait_looks(2)
        time.sleep(2 * STALL_S_MAX)  # noqa: ASYNC251 (the pause under test)
        await client.wait_looks(1)
        assert not client.stalls
        await client.has_stalled.wait()

    run(test)


def test_the_time_starts_when_something_is_unsent() -> None:
    async def test() -> None:
        client = Client(None)
        client.watch.start()
        await client.wait_looks(2 * LOOKS)
        client.taken = 0
        began = asyncio.get_running_loop().time()
        await client.has_stalled.wait()

        assert client.stalls[0] - began >= STALL_S_MAX

    run(test)


def test_a_stopped_watch_does_not_look_and_starts_afresh() -> None:
    async def test() -> None:
        client = Client()
        client.watch.start()
        client.watch.start()
        client.watch.stop()
        client.watch.stop()
        passed = asyncio.Event()
        asyncio.get_running_loop().call_later(STALL_S_MAX * 2 / LOOKS, passed.set)
        await passed.wait()
        assert client.looks.qsize() == 1, "one timer, however often it is started, and none after the stop"
        began = asyncio.get_running_loop().time()
        client.watch.start()
        await client.has_stalled.wait()

        assert client.stalls[0] - began >= STALL_S_MAX

    run(test)
