"""Limits how many requests start in one iteration of the event loop.

If 5,000 requests started at once, one iteration would take seconds, in which no other stream would get a token and no
probe an answer. Instead a few requests start in each iteration, in the order in which they came.
"""

import asyncio
from collections import deque
from collections.abc import Callable

STARTS_MAX = 16
"""Requests that start in one iteration: with what follows from them, a few milliseconds."""


class StartLimiter:
    """Starts requests in order, at most STARTS_MAX in one iteration.

    The queue needs no bound of its own: each connection has at most one request in it.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._left = STARTS_MAX
        self._loop = asyncio.get_running_loop()

    def start(self, begin: Callable[[], None]) -> None:
        """Call `begin` now, or in a later iteration if STARTS_MAX are reached. `begin` must not raise."""
        if self._left == STARTS_MAX:
            self._loop.call_soon(self._start_next)
        if self._left:
            self._left -= 1
            begin()
        else:
            self._waiting.append(begin)

    def _start_next(self) -> None:
        self._left = STARTS_MAX
        for _ in range(min(STARTS_MAX, len(self._waiting))):
            self.start(self._waiting.popleft())
