"""Errors, and the queue from the engine's thread to the caller's event loop."""

import asyncio
from collections.abc import Iterable
from queue import Empty, Queue
from typing import Generic, TypeVar

Item = TypeVar("Item")


class RequestError(RuntimeError):
    """One request failed; the engine continues."""


class CppExecutorError(RuntimeError):
    """The engine failed."""


def has_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class AsyncQueue(Generic[Item]):
    """An unbounded queue, filled by the engine's thread through `sync_q` and read on the loop that created it."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.sync_q: Queue[Item] = Queue()
        self._has_items = asyncio.Event()

    async def get(self) -> Item:
        """Return the next item. An item that is put without a `notify` afterwards may not wake the reader."""
        while True:
            try:
                return self.sync_q.get_nowait()
            except Empty:
                self._has_items.clear()
            if self.sync_q.empty():
                await self._has_items.wait()

    def notify(self) -> None:
        self._has_items.set()


def notify_many(queues: Iterable[AsyncQueue[Item]]) -> None:
    """Wake all readers through the first one's event loop: readers on other loops may not wake up."""
    found = list(queues)
    if not found:
        return

    def notify() -> None:
        for queue in found:
            queue.notify()

    try:
        found[0].loop.call_soon_threadsafe(notify)
    except RuntimeError:
        if not found[0].loop.is_closed():
            raise
