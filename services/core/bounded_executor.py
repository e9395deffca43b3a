"""Runs long computations in a thread, up to a bounded amount of them."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from services.core.errors import CAUSE, Failure, Reason, RefusedFor

PLACES_DEFAULT = 64
BYTES_MAX = 128 * 1024 * 1024
RETRY_AFTER_S = 1.0
TOO_MANY = "too many long requests are prepared at the same time"
T = TypeVar("T")


class BoundedExecutor:
    """Runs functions in a thread of its own, one after another.

    There is one thread because Python runs one at a time: each further one would make the event loop wait longer for
    its turn. `places`: how many functions may run or wait, together; and they work on BYTES_MAX together, or on one
    input of any size.
    """

    def __init__(self, places: int = PLACES_DEFAULT) -> None:
        self._places = places
        self._taken = 0
        self._bytes = 0
        self._thread = ThreadPoolExecutor(max_workers=1)

    async def run(self, function: Callable[..., T], *args: Any, size: int = 0) -> T:
        """Run the function and return its result. Raises what it raises, and OVERLOADED when there is no room for it.

        `size`: bytes of its input. A thread cannot be stopped: if the caller is cancelled, its place stays taken until
        the function returns.
        """
        if self._taken >= self._places or (self._taken and self._bytes + size > BYTES_MAX):
            raise not_prepared(TOO_MANY)
        self._taken += 1
        self._bytes += size
        running = asyncio.get_running_loop().run_in_executor(self._thread, function, *args)
        running.add_done_callback(lambda done: self._leave(done, size))
        await asyncio.wait([running])  # Unlike `await running`, does not cancel it with the caller.
        return running.result()

    def _leave(self, done: "asyncio.Future[Any]", size: int) -> None:
        self._taken -= 1
        self._bytes -= size
        if not done.cancelled():
            done.exception()  # Retrieved even if the caller is gone, so that asyncio does not log it.


def not_prepared(detail: str) -> Failure:
    """OVERLOADED, for a request that cannot be prepared now."""
    return Failure(Reason.OVERLOADED, detail, retry_after_s=RETRY_AFTER_S, metadata={CAUSE: RefusedFor.PREPARATION})
