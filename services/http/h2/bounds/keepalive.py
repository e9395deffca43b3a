"""Asks a silent client whether it is still there, and closes the connection of one that is not."""

import asyncio
from collections.abc import Callable

LOOK_S = 5.0
"""How often a connection is looked at. Looks are counted rather than time: while this process itself stands still,
nothing can be heard."""
SILENT_LOOKS = 2
"""Looks in a row without a byte from the client, after which it is sent a PING."""
SILENT_LOOKS_MAX = 3
"""Looks in a row without a byte, after which the connection is closed: a peer that is gone is noticed within 20 s."""


class Keepalive:
    """Watches one connection. A client that asks too, or that streams to us, is never asked.

    One that takes what waits for it is there, too: it sees the PING only behind that.
    """

    __slots__ = ("_last", "_loop", "_on_lost", "_ping", "_progress", "_silent_count", "_timer", "is_heard")

    def __init__(
        self, ping: Callable[[], None], on_lost: Callable[[], None], progress: Callable[[], int | None]
    ) -> None:
        """`is_heard` must be set whenever something arrives. `progress`: see `StallWatch`."""
        self.is_heard = False
        self._ping = ping
        self._on_lost = on_lost
        self._progress = progress
        self._last: int | None = None
        self._silent_count = 0
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(LOOK_S, self._look)

    def _look(self) -> None:
        progress = self._progress()
        takes = progress is not None and progress != self._last
        self._last = progress
        self._silent_count = 0 if self.is_heard or takes else self._silent_count + 1
        self.is_heard = False
        if self._silent_count >= SILENT_LOOKS_MAX:
            self._on_lost()
            return
        if self._silent_count == SILENT_LOOKS:
            self._ping()
        self._timer = self._loop.call_later(LOOK_S, self._look)

    def stop(self) -> None:
        """Look no more."""
        self._timer.cancel()
