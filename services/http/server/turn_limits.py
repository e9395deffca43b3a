"""Limits what is done for clients in one iteration of the event loop.

If 5,000 requests started at once, one iteration would take seconds, in which no other stream would get a token and no
probe an answer. Instead a few requests start in each iteration, in the order in which they came; a probe does not wait,
but a second one on its connection does. Likewise frames of HTTP/2: a read may bring hundreds, and each may cost as much
as a client likes.
"""

import asyncio
from collections import deque
from collections.abc import Callable

STARTS_MAX = 16
"""Requests that start in one iteration: with what follows from them, a few milliseconds."""
FRAMES_A_TURN_MAX = 512
"""Frames over HTTP/2 that are handled in one iteration, of all connections together: some milliseconds. A frame that
costs more than most counts as several."""


class StartLimiter:
    """Starts requests in order, at most STARTS_MAX in one iteration.

    The queue needs no bound of its own: a connection has one request in it over HTTP/1.1, and over HTTP/2 those of its
    streams, whose number and resets are bounded.
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


class FrameLimiter:
    """Shares FRAMES_A_TURN_MAX among all connections. One that finds none left waits for its turn.

    `left`: of this iteration; less than 0 after a frame that counts as many. The queue needs no bound of its own: each
    connection is in it at most once.
    """

    def __init__(self) -> None:
        self.left = FRAMES_A_TURN_MAX
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_renewal_due = False
        self._loop = asyncio.get_running_loop()

    def spend(self, frames: int) -> None:
        """Count what was handled."""
        self.left -= frames
        self._renew_soon()

    def wait(self, handle: Callable[[], None]) -> None:
        """Call `handle` in a later iteration. It must not raise."""
        self._waiting.append(handle)
        self._renew_soon()

    def _renew_soon(self) -> None:
        if not self._is_renewal_due:
            self._is_renewal_due = True
            self._loop.call_soon(self._renew)

    def _renew(self) -> None:
        self._is_renewal_due = False
        self.left = FRAMES_A_TURN_MAX
        for _ in range(len(self._waiting)):
            if self.left <= 0:
                break
            self._waiting.popleft()()
        if self._waiting:
            self._renew_soon()
