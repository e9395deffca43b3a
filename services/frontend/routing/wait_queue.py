"""Requests that wait for room on some worker. They are woken in order of arrival, and only as many as can find room.

| event | woken next |
| --- | --- |
| a worker comes, or may have room again | the first of the queue |
| a woken request has found room, or leaves before it has looked | the next `WOKEN_BY_EACH` |
| a woken request finds room that it cannot use: too little, or on an excluded worker | the next `WOKEN_BY_EACH` |
| a woken request finds no room at all | none, because the others would find none either |

So room that comes free while others look is found too. A long queue is woken in few turns of the event loop, because
each turn wakes twice as many as the one before.
"""

import asyncio
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

WOKEN_BY_EACH = 2


class Waiter:
    """One request in the queue."""

    __slots__ = ("_queue", "_woken", "number")

    def __init__(self, queue: "WaitQueue", number: int) -> None:
        self._queue = queue
        self._woken = asyncio.Event()
        self.number = number

    async def wait_turn(self) -> None:
        """Wait until it is this request's turn to look for room. It then leaves the queue or calls `wait_again`."""
        await self._woken.wait()

    def wait_again(self, *, is_room_left: bool) -> None:
        """The request has found no room that it can use. `is_room_left`: others may find some."""
        self._woken.clear()
        if is_room_left:
            self._queue.wake_next()

    def wake(self) -> None:
        self._woken.set()

    @property
    def is_woken(self) -> bool:
        return self._woken.is_set()


class WaitQueue:
    """The requests that wait, in order of arrival. It has no bound of its own, because every request has a deadline."""

    def __init__(self) -> None:
        self._waiters: list[Waiter] = []  # In order of their numbers.
        self._numbers = count(1)
        self._woken_to = 0  # Since `wake_first`, all up to this number were woken.

    @property
    def is_empty(self) -> bool:
        return not self._waiters

    @contextmanager
    def join(self) -> Iterator[Waiter]:
        """Wait at the end of the queue, until the end of the block.

        Join before the first `await` after finding no room. Otherwise room that becomes free meanwhile is missed.
        """
        waiter = Waiter(self, next(self._numbers))
        self._waiters.append(waiter)
        try:
            yield waiter
        finally:
            self._waiters.pop(self._position_after(waiter.number) - 1)
            if waiter.is_woken:
                self.wake_next()

    def wake_first(self) -> None:
        """There may be room: begin again with the first of the queue."""
        self._woken_to = 0
        self._wake(1)

    def wake_next(self) -> None:
        """A woken request has looked, or never will: there may be room for more."""
        self._wake(WOKEN_BY_EACH)

    def _wake(self, number: int) -> None:
        start = self._position_after(self._woken_to)
        for waiter in self._waiters[start : start + number]:
            waiter.wake()
            self._woken_to = waiter.number

    def _position_after(self, number: int) -> int:
        """The position of the first waiter with a higher number."""
        return bisect_right(self._waiters, number, key=lambda one: one.number)
