"""Keeps a crowd from keeping everybody else waiting.

With 5,000 requests at once a turn of the loop would take seconds, and for as long no token of another stream would move
and no probe be answered. So only a few requests begin in a turn, in the order they came; the others wait.
"""

import asyncio
from collections import deque
from collections.abc import Callable

BEGUN_MAX = 16
"""A turn: with what follows from them some milliseconds."""


class StartLimiter:
    """Who waits is bounded by whoever comes: each connection has one request at a time here."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._left = BEGUN_MAX
        self._loop = asyncio.get_running_loop()

    def take(self, begin: Callable[[], None]) -> None:
        """Call it now, if it is among the first in this turn of the loop, else in one to come. It must not raise."""
        if self._left == BEGUN_MAX:
            self._loop.call_soon(self._next)
        if self._left:
            self._left -= 1
            begin()
        else:
            self._waiting.append(begin)

    def _next(self) -> None:
        self._left = BEGUN_MAX
        for _ in range(min(BEGUN_MAX, len(self._waiting))):
            self.take(self._waiting.popleft())
