"""Line: whoever waits for room is called in order of arrival, few more than find any, and nobody is forgotten."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from services.frontend.routing.wait_queue import Waiter, WaitQueue
from tests.support.doubles import run_async


class Crowd:
    """Waits in one line for room, of which each takes one, and keeps a record of who looked."""

    def __init__(self, group: asyncio.TaskGroup, *names: str) -> None:
        self.line = WaitQueue()
        self.room = 0
        self.looks: list[str] = []
        self.served: list[str] = []
        self.too_large: set[str] = set()
        self.tasks = {name: group.create_task(self._wait(name)) for name in names}

    async def _wait(self, name: str) -> None:
        with self.line.place() as place:
            while True:
                await place.wait_call()
                self.looks.append(name)
                if self.room and name not in self.too_large:
                    self.room -= 1
                    self.served.append(name)
                    return
                place.keep(is_room_left=self.room > 0)

    async def come(self, room: int) -> None:
        """So much comes free. Until all is quiet again."""
        self.room += room
        self.line.call_first()
        await quiet()

    def leave(self) -> None:
        for task in self.tasks.values():
            task.cancel()


async def quiet() -> None:
    """Many more turns than these few waiters need."""
    for _ in range(50):
        await asyncio.sleep(0)


@contextmanager
def crowd(group: asyncio.TaskGroup, *names: str) -> Iterator[Crowd]:
    waiting = Crowd(group, *names)
    try:
        yield waiting
    finally:
        waiting.leave()


def looks_for(room: int, waiting: int) -> tuple[int, int]:
    """How many look, and how many find, when so much room comes to so many."""

    async def scenario() -> tuple[int, int]:
        async with asyncio.TaskGroup() as group:
            with crowd(group, *map(str, range(waiting))) as them:
                await quiet()
                await them.come(room)
                return len(them.looks), len(them.served)

    return run_async(scenario())


@pytest.mark.parametrize("waiting", [10, 100, 1000])
def test_room_for_one_is_looked_for_by_as_many_however_many_wait(waiting: int) -> None:
    """It once woke all of them for each place that came free."""
    assert looks_for(1, waiting) == (3, 1)


@pytest.mark.parametrize("room", [0, 1, 2, 5, 100])
def test_all_room_is_found_and_few_look_in_vain(room: int) -> None:
    looks, served = looks_for(room, 200)

    assert served == room
    assert looks <= 2 * room + 1


def test_the_first_to_come_is_the_first_to_be_served() -> None:
    async def scenario() -> None:
        async with asyncio.TaskGroup() as group:
            with crowd(group, "a", "b", "c", "d", "e") as them:
                await quiet()
                for room in (1, 3):
                    await them.come(room)
                assert them.served == ["a", "b", "c", "d"]

    run_async(scenario())


def test_room_that_one_cannot_use_goes_to_the_next_and_its_place_stays_the_first() -> None:
    async def scenario() -> None:
        async with asyncio.TaskGroup() as group:
            with crowd(group, "a", "b", "c") as them:
                await quiet()
                them.too_large = {"a"}
                await them.come(1)
                assert them.served == ["b"]
                them.too_large = set()
                await them.come(1)
                assert them.served == ["b", "a"]

    run_async(scenario())


@pytest.mark.parametrize("leaving", [("a",), ("a", "b")])
def test_whoever_is_cancelled_when_it_was_called_leaves_its_call_to_the_next(leaving: tuple[str, ...]) -> None:
    async def scenario() -> None:
        async with asyncio.TaskGroup() as group:
            with crowd(group, "a", "b", "c") as them:
                await quiet()
                them.room = 1
                them.line.call_first()
                for name in leaving:
                    them.tasks[name].cancel()
                await quiet()
                assert len(them.served) == 1
                assert not set(them.served) & set(leaving)

    run_async(scenario())


def test_whoever_leaves_uncalled_calls_nobody() -> None:
    async def scenario() -> None:
        async with asyncio.TaskGroup() as group:
            with crowd(group, "a", "b") as them:
                await quiet()
                them.tasks["a"].cancel()
                await quiet()
                assert them.looks == []

    run_async(scenario())


def test_room_that_comes_while_others_look_is_found_without_further_news() -> None:
    """A worker that is not full any more tells it once, however many of its places come free in one turn."""

    async def scenario() -> None:
        async with asyncio.TaskGroup() as group:
            with crowd(group, "a", "b", "c") as them:
                await quiet()
                them.room = 1
                them.line.call_first()
                them.room = 3
                await quiet()
                assert them.served == ["a", "b", "c"]

    run_async(scenario())


def test_news_while_others_look_begin_at_the_front_again() -> None:
    line = WaitQueue()

    with ExitStack() as places:
        first, second, third = (places.enter_context(line.place()) for _ in range(3))
        line.call_first()
        first.keep(is_room_left=True)
        assert called(first, second, third) == [False, True, True]
        line.call_first()
        assert called(first, second, third) == [True, True, True]


def called(*places: Waiter) -> list[bool]:
    return [place.is_called for place in places]


def test_a_line_that_all_have_left_is_empty() -> None:
    line = WaitQueue()

    with line.place():
        assert not line.is_empty

    assert line.is_empty
