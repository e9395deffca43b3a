"""Who waits for room on some worker: called in order of arrival, and no more of them than can find any.

| event | who looks next |
| --- | --- |
| a worker comes, or has room again | the first of the line |
| one that was called has found room, or leaves before it has looked | the next `CALLED_BY_EACH` |
| one finds room that it cannot use: for fewer choices, or on a worker that it excludes | the next `CALLED_BY_EACH` |
| one finds no room at all | nobody: the others would find none either |

So room that comes while others look is found too, and a crowd is called in few turns of the loop: each doubles it.
"""

import asyncio
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

CALLED_BY_EACH = 2


class Waiter:
    """Of one that waits, in a line."""

    __slots__ = ("_called", "_line", "number")

    def __init__(self, line: "WaitQueue", number: int) -> None:
        self._line = line
        self._called = asyncio.Event()
        self.number = number

    async def wait_call(self) -> None:
        """Until it is this one's turn to look. What it finds is for `keep`, unless it leaves the line with it."""
        await self._called.wait()

    def keep(self, *, is_room_left: bool) -> None:
        """It has looked, and found nothing for itself. is_room_left: others may."""
        self._called.clear()
        if is_room_left:
            self._line.call_next()

    def call(self) -> None:
        self._called.set()

    @property
    def is_called(self) -> bool:
        return self._called.is_set()


class WaitQueue:
    """Bounded by whoever waits in it: each has a deadline of its own."""

    def __init__(self) -> None:
        self._places: list[Waiter] = []  # In order of their numbers.
        self._numbers = count(1)
        self._called_to = 0  # Since the last news, all up to this number have been called.

    @property
    def is_empty(self) -> bool:
        """Whether nobody waits."""
        return not self._places

    @contextmanager
    def place(self) -> Iterator[Waiter]:
        """The last place, until the end of the block. To be taken before any await after the look that was in vain."""
        place = Waiter(self, next(self._numbers))
        self._places.append(place)
        try:
            yield place
        finally:
            self._places.pop(self._find(place.number) - 1)
            if place.is_called:
                self.call_next()

    def call_first(self) -> None:
        """There is news of room: the line is called from its beginning."""
        self._called_to = 0
        self._call(1)

    def call_next(self) -> None:
        """Whoever was called has looked, or will not: there may be room for more."""
        self._call(CALLED_BY_EACH)

    def _call(self, number: int) -> None:
        start = self._find(self._called_to)
        for place in self._places[start : start + number]:
            place.call()
            self._called_to = place.number

    def _find(self, number: int) -> int:
        """How many have this number or a lower one."""
        return bisect_right(self._places, number, key=lambda one: one.number)
