"""Errors, and the queue that crosses from the engine's thread to the caller's loop."""

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class RequestError(RuntimeError):
    """One request failed; the engine goes on."""


class CppExecutorError(RuntimeError):
    """The engine failed."""


def has_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class AsyncQueue(Generic[Item]):
    """Filled by the engine's thread, read on the loop that ran when it was made. Unbounded."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._items: deque[Item] = deque()
        self._has_items = asyncio.Event()

    def put(self, item: Item) -> None:
        """Add without waking the reader: see notify_many."""
        self._items.append(item)

    async def get(self) -> Item:
        while not self._items:
            self._has_items.clear()
            if not self._items:
                await self._has_items.wait()
        return self._items.popleft()

    def notify(self) -> None:
        self._has_items.set()


def notify_many(queues: Iterable[AsyncQueue[Item]]) -> None:
    """Wake all readers by way of one loop, the last one's: a reader on another loop may sleep on."""
    found = list(queues)
    if not found:
        return

    def notify() -> None:
        for queue in found:
            queue.notify()

    try:
        found[-1].loop.call_soon_threadsafe(notify)
    except RuntimeError:
        if not found[-1].loop.is_closed():
            raise
