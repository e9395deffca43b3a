"""Notices the pauses of a stream, so that comments can show proxies and clients that it lives."""

import asyncio
from collections.abc import Callable

from services.core.interface import Delta


def _ignore() -> None:
    """Called for a pause after `stop`; never."""


class Keepalive:
    """Calls `on_pause` when a stream has had no event for `pause_s`, and again every `pause_s` until the next event.

    It has one timer, which an event does not touch: when the timer fires, it is set for what is left of the pause.
    """

    def __init__(self, pause_s: float, on_pause: Callable[[], None]) -> None:
        self._pause_s = pause_s
        self._on_pause = on_pause
        self._loop = asyncio.get_running_loop()
        self._last_at = self._loop.time()
        self._timer = self._loop.call_later(pause_s, self._look)

    def noting(self, events_of: Callable[[Delta], bytes]) -> Callable[[Delta], bytes]:
        """`events_of`, with each event ending the pause before it."""

        clock = self._loop.time

        def noted(delta: Delta) -> bytes:
            if events := events_of(delta):
                self._last_at = clock()
            return events

        return noted

    def _look(self) -> None:
        now = self._loop.time()
        if now - self._last_at >= self._pause_s:
            self._on_pause()
            self._last_at = now
        self._timer = self._loop.call_later(self._last_at + self._pause_s - now, self._look)

    def stop(self) -> None:
        """Call `on_pause` no more."""
        self._timer.cancel()
        self._on_pause = _ignore  # It breaks a reference cycle.
