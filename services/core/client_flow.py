"""How slowly a client may read, alike over both protocols."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientBounds:
    """buffer_bytes_max: what may be unsent to one client before its request is ended with SLOW_CLIENT.

    stall_s_max: how long a client may take nothing at all while something is unsent. drain_s_max: how long it may take
    to accept what is unsent when its answer has ended.
    """

    buffer_bytes_max: int = 4 * 1024 * 1024
    stall_s_max: float = 30.0
    drain_s_max: float = 30.0


LOOKS = 4
"""In the time that a client may take nothing. It is cut at the first look after that: a fourth of it later at most.

They are counted, and not the time: while this process stood still itself, a client could take nothing.
"""


class StallWatch:
    """Looks now and then at how much a client has taken; calls `on_stall` once that has not grown for `stall_s_max`.

    A client of whom nothing is wanted, because nothing is unsent, does not stall.
    """

    def __init__(self, stall_s_max: float, taken: Callable[[], int | None], on_stall: Callable[[], None]) -> None:
        """taken: a number that changes with all that the client takes; None: nothing is unsent."""
        self._stall_s_max = stall_s_max
        self._taken = taken
        self._on_stall = on_stall
        self._timer: asyncio.TimerHandle | None = None
        self._last: int | None = None
        self._still_count = 0  # Looks in a row at which nothing more was taken.
        self.has_stalled = False

    def start(self) -> None:
        """Look from now on; nothing happens if that is so already."""
        if self._timer is None:
            self._last = None
            self._look()

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        taken = self._taken()
        self._still_count = self._still_count + 1 if taken is not None and taken == self._last else 0
        self._last = taken
        if self._still_count == LOOKS:
            self._timer = None
            self.has_stalled = True
            self._on_stall()
        else:
            self._timer = asyncio.get_running_loop().call_later(self._stall_s_max / LOOKS, self._look)
