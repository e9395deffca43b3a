"""What stands in groups of exceptions: a TaskGroup wraps whatever ended it, and groups can stand in groups."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


def leaf_of(error: BaseException) -> BaseException:
    """The first exception in it that is no group; the error itself if it is none."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def root_cause(group: BaseExceptionGroup[Any]) -> BaseException:
    """The first exception in a group that is not a group: who opens a TaskGroup with one child that matters, asks.

    Raises CancelledError when the asking task was cancelled meanwhile: before Python 3.13 a TaskGroup that fails
    forgets that, and a loop around it would go on for ever.
    """
    asking = asyncio.current_task()
    if asking is not None and asking.cancelling():
        raise asyncio.CancelledError
    return leaf_of(group)


class TaskSet:
    """Its owner awaits `end` on every way out, and ends soon when it hears of a bug: `end` raises it."""

    __slots__ = ("_has_ended", "_on_bug", "_tasks", "bug")

    def __init__(self, on_bug: Callable[[], object]) -> None:
        self._on_bug = on_bug
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_ended = asyncio.Event()
        self.bug: BaseException | None = None

    def start(self, work: Coroutine[object, object, None]) -> Callable[[], object]:
        """Run it in a task. Returns what cancels it."""
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
        """Until one has ended since it was last waited for."""
        await self._has_ended.wait()
        self._has_ended.clear()

    async def end(self) -> None:
        """Cancel them, and wait until they are gone. Raises a bug that one had, and CancelledError before that, if the
        request was cancelled meanwhile.
        """
        for task in self._tasks:
            if not task.cancelling():  # One that is on its way out already may be cleaning up.
                task.cancel()
        own = asyncio.current_task()
        assert own is not None, "a request has a task"
        while self._tasks:
            try:
                await asyncio.wait(self._tasks)
            except asyncio.CancelledError:
                assert own.cancelling(), "it is raised as soon as they are gone"
        if own.cancelling():
            raise asyncio.CancelledError
        if self.bug is not None:
            raise self.bug
