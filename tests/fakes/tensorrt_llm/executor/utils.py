"""Errors, and the queue that crosses from the engine's thread to the caller's loop."""

import asyncio
from collections.abc import Iterable
from queue import Empty, Queue
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
    """Read on the loop that ran when it was made; filled by the engine's thread through `sync_q`. Unbounded."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.sync_q: Queue[Item] = Queue()
        self._has_items = asyncio.Event()

    async def get(self) -> Item:
        """What is put without a `notify` afterwards may be slept through."""
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
    """Wake all readers by way of one loop, the first one's: a reader on another loop may sleep on."""
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
