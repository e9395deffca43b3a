"""Bounds the handshakes of a server: how many run, for how long, and how much of one iteration of the event loop.

A handshake costs the server 0.2 to 1.5 ms, a hundred times what a token costs. If a storm of clients were greeted at
once, running streams would stand still meanwhile.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from services.runtime.loop import clock

HANDSHAKES_MAX = 1024
"""Connections whose handshake is under way. When one more begins, the oldest is closed: an honest client needs only one
or two round trips."""
HANDSHAKE_S_MAX = 10.0
"""How long a handshake may take."""
HANDSHAKE_TURN_S = 0.002
"""How much of one iteration of the event loop the handshakes of one server may use together. The last may exceed it."""


class PendingHandshake(Protocol):
    """A connection whose handshake is under way."""

    def expire(self, why: str) -> None:
        """Close the connection."""
        ...


class Handshakes:
    """The handshakes of one server."""

    def __init__(self, on_ended: Callable[[], None] = lambda: None) -> None:
        """`on_ended`: called after a connection was closed without a handshake."""
        self.on_ended = on_ended
        self._running: dict[PendingHandshake, asyncio.TimerHandle] = {}  # Oldest first.
        self._steps: deque[Callable[[], None]] = deque()
        self._is_turn_due = False
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self._running)

    def begin(self, one: PendingHandshake) -> None:
        """A handshake begins. It must end with `end`."""
        if len(self._running) >= HANDSHAKES_MAX:
            next(iter(self._running)).expire(f"more than {HANDSHAKES_MAX} handshakes are under way")
        why = f"the handshake took longer than {HANDSHAKE_S_MAX:g} s"
        self._running[one] = self._loop.call_later(HANDSHAKE_S_MAX, one.expire, why)

    def end(self, one: PendingHandshake) -> None:
        """The handshake is over, one way or the other. Idempotent."""
        if (timer := self._running.pop(one, None)) is not None:
            timer.cancel()

    def step(self, handle: Callable[[], None]) -> None:
        """Call `handle`, which may be expensive, when it is its turn. What it raises goes to the loop's handler.

        A connection has one step in the queue at a time, so HANDSHAKES_MAX bounds it.
        """
        self._steps.append(handle)
        self._turn_soon()

    def close(self) -> None:
        """Close the connections whose handshake is under way."""
        for one in list(self._running):
            one.expire("the server closes")

    def _turn_soon(self) -> None:
        if not self._is_turn_due:
            self._is_turn_due = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._is_turn_due = False
        until = clock() + HANDSHAKE_TURN_S
        try:
            while self._steps:
                self._steps.popleft()()
                if clock() >= until:
                    break
        finally:  # A step that raises must not stop the others.
            if self._steps:
                self._turn_soon()
