"""Helpers for asyncio: a bounded wait, the exception that ended a TaskGroup, and a set of tasks with one owner."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


async def wait_event(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait until the event is set. Returns False if it is not set within `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


def leaf_of(error: BaseException) -> BaseException:
    """Return the first exception in nested exception groups, or `error` itself if it is not a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def root_cause(group: BaseExceptionGroup[Any]) -> BaseException:
    """Return the exception that ended a TaskGroup in which only one child matters.

    Raises CancelledError if the current task has been cancelled. Before Python 3.13 a failing TaskGroup swallows that
    cancellation, and a loop around the group would never end.
    """
    current = asyncio.current_task()
    if current is not None and current.cancelling():
        raise asyncio.CancelledError
    return leaf_of(group)


class TaskSet:
    """Tasks that may start and end at any time while their owner runs.

    The owner must await `end` on every way out. `on_bug` is called when a task raises; the owner should then end soon,
    and `end` raises the exception.
    """

    __slots__ = ("_has_ended", "_on_bug", "_tasks", "bug")

    def __init__(self, on_bug: Callable[[], object]) -> None:
        self._on_bug = on_bug
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_ended = asyncio.Event()
        self.bug: BaseException | None = None

    def start(self, work: Coroutine[object, object, None]) -> Callable[[], object]:
        """Run `work` in a task. Returns a function that cancels it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task.cancel

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._has_ended.set()
        if not task.cancelled() and (bug := task.exception()) is not None:
            self.bug = self.bug or bug
            self._on_bug()

    async def wait_ended(self) -> None:
        """Wait until a task has ended since the previous call returned."""
        await self._has_ended.wait()
        self._has_ended.clear()

    async def end(self) -> None:
        """Cancel the tasks and wait until all have ended.

        Raises CancelledError if the owner was cancelled, otherwise the first exception that a task raised.
        """
        for task in self._tasks:
            if not task.cancelling():  # A task that is already cancelled may be cleaning up.
                task.cancel()
        own = asyncio.current_task()
        assert own is not None, "the owner runs in a task"
        while self._tasks:
            try:
                await asyncio.wait(self._tasks)
            except asyncio.CancelledError:
                assert own.cancelling(), "raised again below, once the tasks have ended"
        if own.cancelling():
            raise asyncio.CancelledError
        if self.bug is not None:
            raise self.bug
