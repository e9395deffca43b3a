"""Ends what a task is doing from outside of it: from a sink or a callback, which cannot raise into it."""

import asyncio
from types import TracebackType


class CancelScope:
    """`with CancelScope() as scope:` what runs in it can be ended by `scope.cancel()`; the task goes on after it.

    A cancel of the whole task that comes at the same time, or of a scope around it, is passed on, whichever came first.
    It is what asyncio.Timeout does, without a time: that one takes two coroutines, and asks twice for the loop.
    """

    __slots__ = ("_cancelling", "_is_asked", "_is_cancelled", "_loop", "_task")

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """loop: the running one, from whoever has it. To ask for it is a system call, before Python 3.12."""
        self._loop = loop
        self._task: asyncio.Task[object] | None = None  # While the scope is open.
        self._cancelling = 0  # How many cancels of the task were under way already.
        self._is_asked = self._is_cancelled = False

    def __enter__(self) -> "CancelScope":
        task = asyncio.current_task(self._loop)
        assert task is not None, "only a task can be cancelled"
        self._task, self._cancelling = task, task.cancelling()
        return self

    def cancel(self) -> None:
        """End what runs in the scope. Idempotent; does nothing once that has ended by itself."""
        if self._task is not None and not self._is_asked:
            self._is_asked = True
            # The task may be who asks. Before Python 3.13 it can't take back a cancel that it has not met in the scope.
            self._task.get_loop().call_soon(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._is_cancelled = True
            self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        task, self._task = self._task, None
        assert task is not None, "it was entered"
        if not self._is_cancelled:
            return False
        is_ours_alone = task.uncancel() <= self._cancelling
        return is_ours_alone and kind is asyncio.CancelledError
