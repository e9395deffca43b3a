"""Asks a silent client whether it is still there, and closes the connection of one that is not."""

import asyncio
from collections.abc import Callable

LOOK_S = 5.0
"""How often a connection is looked at. Looks are counted rather than time: while this process itself stands still,
nothing can be heard."""
SILENT_LOOKS = 2
"""Looks in a row in which the client says nothing and takes nothing, after which it is sent a PING."""
SILENT_LOOKS_MAX = 3
"""The same, after which the connection is closed: a peer that is gone is noticed within 20 s."""


class Keepalive:
    """Watches one connection. A client that asks too, or that streams to us, is never asked.

    One that takes what is sent is there, too, even if it does not answer the PING: programs with httpx read only while
    they wait for an answer, and may do something else meanwhile. What its kernel has taken counts, on Linux. A client
    that never reads is for the bounds of slow clients.
    """

    __slots__ = ("_loop", "_on_lost", "_ping", "_progress", "_silent_count", "_taken", "_timer", "is_heard")

    def __init__(self, ping: Callable[[], None], on_lost: Callable[[], None], progress: Callable[[], int]) -> None:
        """`is_heard` must be set whenever something arrives. `progress`: changes when the client takes something."""
        self.is_heard = False
        self._ping = ping
        self._on_lost = on_lost
        self._progress = progress
        self._taken = 0
        self._silent_count = 0
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(LOOK_S, self._look)

    def _look(self) -> None:
        before, self._taken = self._taken, self._progress()
        self._silent_count = 0 if self.is_heard or self._taken != before else self._silent_count + 1
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
