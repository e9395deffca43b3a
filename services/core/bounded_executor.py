"""Runs long computations in threads, up to a bounded number of them."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from services.core.errors import CAUSE, Failure, Reason, RefusedFor

PLACES_DEFAULT = 64
RETRY_AFTER_S = 1.0
TOO_MANY = "too many long requests are prepared at the same time"
T = TypeVar("T")


class BoundedExecutor:
    """Runs functions in the event loop's threads. `places`: how many may run or wait for a thread, together."""

    def __init__(self, places: int = PLACES_DEFAULT) -> None:
        self._places = places
        self._taken = 0

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Run the function and return its result. Raises what it raises, and OVERLOADED when all places are taken.

        A thread cannot be stopped: if the caller is cancelled, its place stays taken until the function returns.
        """
        if self._taken >= self._places:
            raise not_prepared(TOO_MANY)
        self._taken += 1
        running = asyncio.get_running_loop().run_in_executor(None, function, *args)
        running.add_done_callback(self._leave)
        await asyncio.wait([running])  # Unlike `await running`, does not cancel it with the caller.
        return running.result()

    def _leave(self, done: "asyncio.Future[Any]") -> None:
        self._taken -= 1
        if not done.cancelled():
            done.exception()  # Retrieved even if the caller is gone, so that asyncio does not log it.


def not_prepared(detail: str) -> Failure:
    """OVERLOADED, for a request that cannot be prepared now."""
    return Failure(Reason.OVERLOADED, detail, retry_after_s=RETRY_AFTER_S, metadata={CAUSE: RefusedFor.PREPARATION})
