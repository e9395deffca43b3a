"""Requests whose content is still arriving, and the bound of that time: one timer for all of a connection."""

import asyncio

from services.http.h2.stream import Stream
from services.runtime.loop import clock


class Arrivals:
    """Streams whose request is not complete, oldest first."""

    __slots__ = ("_began_at", "_seconds_max", "_timer")

    def __init__(self, seconds_max: float) -> None:
        """`seconds_max`: how long a stream may stay here."""
        self._seconds_max = seconds_max
        self._began_at: dict[Stream, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, stream: Stream) -> None:
        """More follows on the stream. Call `watch` afterwards."""
        self._began_at[stream] = clock()

    def remove(self, stream: Stream) -> None:
        """The rest is not waited for any more. Idempotent."""
        self._began_at.pop(stream, None)

    def watch(self) -> None:
        """Wait for the oldest. Once for all of a read: most requests arrive whole, so that they need no timer."""
        if self._began_at and self._timer is None:
            self._set_timer()

    def _set_timer(self) -> None:
        oldest = next(iter(self._began_at.values()))
        delay_s = max(0.0, oldest + self._seconds_max - clock())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._look)

    def _look(self) -> None:
        self._timer = None
        latest = clock() - self._seconds_max
        for stream in [one for one, began_at in self._began_at.items() if began_at <= latest]:
            self.remove(stream)
            stream.receiver.on_late()
        self.watch()

    def stop(self) -> None:
        """Watch no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._began_at.clear()
