"""How slowly a client may read, over HTTP and over gRPC."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

CONNECTION_SHARES = 16
"""How many times `buffer_bytes_max` may be unsent on all streams of one connection together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientBounds:
    """`buffer_bytes_max`: unsent bytes for one client above which its request is ended with SLOW_CLIENT.

    `stall_s_max`: how long a client may accept nothing while something is unsent. `drain_s_max`: how long it may take
    to accept the rest after its answer has ended.
    """

    buffer_bytes_max: int = 4 * 1024 * 1024
    stall_s_max: float = 30.0
    drain_s_max: float = 30.0

    @property
    def connection_bytes_max(self) -> int:
        """Unsent bytes on all streams of one connection above which the one with most is ended with SLOW_CLIENT."""
        return CONNECTION_SHARES * self.buffer_bytes_max

    def drain_s(self, size: int) -> float:
        """How long a client may take for the last `size` bytes: `drain_s_max` for up to `buffer_bytes_max` bytes.

        More bytes get proportionally more time, so that the least speed of their client is the same.
        """
        return self.drain_s_max * max(1.0, size / self.buffer_bytes_max)


LOOKS = 4
"""How often a client is looked at in `stall_s_max`. A stall is noticed at most a quarter of that time late.

Looks are counted rather than time: while this process itself stands still, a client cannot send us its progress.
"""


class StallWatch:
    """Looks at a client's progress at intervals, and calls `on_stall` after `stall_s_max` without any.

    A client for which nothing is unsent does not stall.
    """

    def __init__(self, stall_s_max: float, progress: Callable[[], int | None], on_stall: Callable[[], None]) -> None:
        """`progress`: returns a number that changes whenever the client accepts data, or None if nothing is unsent."""
        self._stall_s_max = stall_s_max
        self._progress = progress
        self._on_stall = on_stall
        self._timer: asyncio.TimerHandle | None = None
        self._last: int | None = None
        self._still_count = 0  # Looks in a row without progress.
        self.has_stalled = False

    def start(self) -> None:
        """Start looking. Does nothing if the watch runs already."""
        if self._timer is None:
            self._last = None
            self._look()

    def stop(self) -> None:
        """Stop looking. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        progress = self._progress()
        self._still_count = self._still_count + 1 if progress is not None and progress == self._last else 0
        self._last = progress
        if self._still_count == LOOKS:
            self._timer = None
            self.has_stalled = True
            self._on_stall()
        else:
            self._timer = asyncio.get_running_loop().call_later(self._stall_s_max / LOOKS, self._look)
