"""Cancels part of a task from outside: from a sink or a callback, which cannot raise into the task."""

import asyncio
from types import TracebackType


class CancelScope:
    """The body of `with CancelScope() as scope:` ends when `scope.cancel()` is called; the task continues after it.

    If the task or an outer scope is cancelled at the same time, that cancellation is passed on, whichever came first.
    Works as asyncio.Timeout does, without a timer, and costs less: asyncio.Timeout runs two coroutines and asks for the
    running loop twice.
    """

    __slots__ = ("_cancelling", "_is_asked", "_is_cancelled", "_loop", "_task")

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """`loop`: the running loop, if the caller has it. Before Python 3.12, looking it up costs a system call."""
        self._loop = loop
        self._task: asyncio.Task[object] | None = None  # Set while the scope is open.
        self._cancelling = 0  # Cancellations of the task that were pending when the scope was opened.
        self._is_asked = self._is_cancelled = False

    def __enter__(self) -> "CancelScope":
        task = asyncio.current_task(self._loop)
        assert task is not None, "only a task can be cancelled"
        self._task, self._cancelling = task, task.cancelling()
        return self

    def cancel(self) -> None:
        """End the body of the scope. Idempotent; does nothing if the body has ended."""
        if self._task is not None and not self._is_asked:
            self._is_asked = True
            # Deferred, because the caller may be the task itself: before Python 3.13 a task cannot take back a
            # cancellation that was not raised within the scope.
            self._task.get_loop().call_soon(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._is_cancelled = True
            self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        task, self._task = self._task, None
        assert task is not None, "the scope was entered"
        if not self._is_cancelled:
            return False
        is_ours_alone = task.uncancel() <= self._cancelling
        return is_ours_alone and kind is asyncio.CancelledError
