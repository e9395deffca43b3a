"""Wait queue: requests are woken in order of arrival, few more than can find room, and none is forgotten."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from services.frontend.routing.wait_queue import Waiter, WaitQueue
from tests.support.doubles import run_async


class Crowd:
    """Requests in one queue, each of which takes one unit of room. `looks`: which of them looked, in order."""

    def __init__(self, group: asyncio.TaskGroup, *names: str) -> None:
        self.queue = WaitQueue()
        self.room = 0
        self.looks: list[str] = []
        self.served: list[str] = []
        self.too_large: set[str] = set()
        self.tasks = {name: group.create_task(self._wait(name)) for name in names}

    async def _wait(self, name: str) -> None:
        with self.queue.join() as waiter:
            while True:
                await waiter.wait_turn()
                self.looks.append(name)
                if self.room and name not in self.too_large:
                    self.room -= 1
                    self.served.append(name)
                    return
                waiter.wait_again(is_room_left=self.room > 0)

    async def come(self, room: int) -> None:
        """Free some room, and wait until all requests wait again."""
        self.room += room
        self.queue.wake_first()
        await quiet()

    def leave(self) -> None:
        for task in self.tasks.values():
            task.cancel()


async def quiet() -> None:
    """Run many more turns of the loop than these few requests need."""
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
    """How many requests look, and how many find room, if `waiting` wait and `room` comes free."""

    async def scenario() -> tuple[int, int]:
        async with asyncio.TaskGroup() as group:
            with crowd(group, *map(str, range(waiting))) as them:
                await quiet()
                await them.come(room)
                return len(them.looks), len(them.served)

    return run_async(scenario())


@pytest.mark.parametrize("waiting", [10, 100, 1000])
def test_three_requests_look_for_room_for_one_however_many_wait(waiting: int) -> None:
    """A bug: all of them were woken for each place that came free."""
    assert looks_for(1, waiting) == (3, 1)


@pytest.mark.parametrize("room", [0, 1, 2, 5, 100])
def test_all_room_is_found_and_few_requests_look_in_vain(room: int) -> None:
    looks, served = looks_for(room, 200)

    assert served == room
    assert looks <= 2 * room + 1


def test_requests_find_room_in_order_of_arrival() -> None:
    async def scenario() -> None:
        async with asyncio.TaskGroup() as group:
            with crowd(group, "a", "b", "c", "d", "e") as them:
                await quiet()
                for room in (1, 3):
                    await them.come(room)
                assert them.served == ["a", "b", "c", "d"]

    run_async(scenario())


def test_room_that_the_first_cannot_use_goes_to_the_next_and_the_first_keeps_its_place() -> None:
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
def test_a_woken_request_that_is_cancelled_wakes_the_next(leaving: tuple[str, ...]) -> None:
    async def scenario() -> None:
        async with asyncio.TaskGroup() as group:
            with crowd(group, "a", "b", "c") as them:
                await quiet()
                them.room = 1
                them.queue.wake_first()
                for name in leaving:
                    them.tasks[name].cancel()
                await quiet()
                assert len(them.served) == 1
                assert not set(them.served) & set(leaving)

    run_async(scenario())


def test_a_request_that_leaves_before_it_is_woken_wakes_none() -> None:
    async def scenario() -> None:
        async with asyncio.TaskGroup() as group:
            with crowd(group, "a", "b") as them:
                await quiet()
                them.tasks["a"].cancel()
                await quiet()
                assert them.looks == []

    run_async(scenario())


def test_room_that_comes_free_while_others_look_is_found_without_another_event() -> None:
    """A worker reports once that it is no longer full, however many of its places come free in one turn."""

    async def scenario() -> None:
        async with asyncio.TaskGroup() as group:
            with crowd(group, "a", "b", "c") as them:
                await quiet()
                them.room = 1
                them.queue.wake_first()
                them.room = 3
                await quiet()
                assert them.served == ["a", "b", "c"]

    run_async(scenario())


def test_an_event_while_others_look_wakes_the_first_again() -> None:
    queue = WaitQueue()

    with ExitStack() as stack:
        first, second, third = (stack.enter_context(queue.join()) for _ in range(3))
        queue.wake_first()
        first.wait_again(is_room_left=True)
        assert woken(first, second, third) == [False, True, True]
        queue.wake_first()
        assert woken(first, second, third) == [True, True, True]


def woken(*waiters: Waiter) -> list[bool]:
    return [waiter.is_woken for waiter in waiters]


def test_a_queue_that_all_requests_have_left_is_empty() -> None:
    queue = WaitQueue()

    with queue.join():
        assert not queue.is_empty

    assert queue.is_empty
