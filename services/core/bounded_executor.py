"""Long computations beside the event loop: in a thread, and never more than a bounded number of them."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from services.core.errors import CAUSE, Failure, Reason, RefusedFor

PLACES_DEFAULT = 64
RETRY_AFTER_S = 1.0
T = TypeVar("T")


class BoundedExecutor:
    """Runs functions in the loop's threads; what runs and what waits for a thread have `places` together."""

    def __init__(self, places: int = PLACES_DEFAULT) -> None:
        self._places = places
        self._taken = 0

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """What the function returns or raises. Raises OVERLOADED when all places are taken.

        A thread can't be stopped: the place of an asker that leaves is taken until the function is done.
        """
        if self._taken >= self._places:
            detail = "too many long requests are being prepared at once"
            cause = {CAUSE: RefusedFor.PREPARATION}
            raise Failure(Reason.OVERLOADED, detail, retry_after_s=RETRY_AFTER_S, metadata=cause)
        self._taken += 1
        running = asyncio.get_running_loop().run_in_executor(None, function, *args)
        running.add_done_callback(self._leave)
        await asyncio.wait([running])  # Unlike awaiting it, this does not cancel it with its asker.
        return running.result()

    def _leave(self, done: "asyncio.Future[Any]") -> None:
        self._taken -= 1
        if not done.cancelled():
            done.exception()  # Taken note of, though its asker may have left.
