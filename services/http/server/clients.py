"""The open connections of a server: closes idle ones, and all of them when the server ends."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Protocol

from services.runtime.loop import clock

IDLE_CHECK_S = 1.0
"""An idle connection stays open at most this much longer than `keepalive_s`."""


class Client(Protocol):
    """An open connection."""

    @property
    def tasks(self) -> Collection[asyncio.Task[None]]:
        """The tasks that answer requests."""
        ...

    def drain(self) -> None:
        """Have the client send its further requests elsewhere, if the protocol can tell it."""
        ...

    def leave(self) -> None:
        """Close the connection, which answers no request."""
        ...

    def close(self) -> None:
        """Refuse what has not begun, and close the connection once the running answers have ended."""
        ...

    def abort(self) -> None:
        """Close the connection at once, and cancel its task."""
        ...


class Clients:
    """The open connections of a server. Its length is their number. `stream_count`: streams of HTTP/2 on them."""

    def __init__(self, keepalive_s: float) -> None:
        """`keepalive_s`: how long a connection may be idle."""
        self.is_closing = False
        self.stream_count = 0
        self._keepalive_s = keepalive_s
        self._open: dict[Client, None] = {}  # In the order in which they came.
        self._idle: OrderedDict[Client, float] = OrderedDict()  # → idle since, in event-loop time
        self._timer: asyncio.TimerHandle | None = None
        self.on_removed: Callable[[], None] | None = None
        """Called after a connection was closed and removed."""

    def __len__(self) -> int:
        return len(self._open)

    @property
    def held_count(self) -> int:
        """See `Crowd`."""
        return len(self._open) + self.stream_count

    def add(self, client: Client) -> None:
        """Add a new connection, which is idle. If the server is closing, it is closed instead."""
        if self.is_closing:
            client.abort()
            return
        self._open[client] = None
        self.set_idle(client)

    def forget(self, client: Client) -> None:
        """Another client has taken its connection over, which goes on."""
        self._open.pop(client, None)
        self.set_busy(client)

    def remove(self, client: Client) -> None:
        """Remove a closed connection."""
        self.forget(client)
        if self.on_removed is not None:
            self.on_removed()

    def set_idle(self, client: Client) -> None:
        """Start the idle time of a connection, unless it is running already."""
        self._idle.setdefault(client, clock())
        if self._timer is None:
            self._close_idle()

    def set_busy(self, client: Client) -> None:
        """A request is arriving or being answered. Idempotent."""
        self._idle.pop(client, None)

    def _close_idle(self) -> None:
        """Close the connections whose idle time is over, oldest first."""
        latest = clock() - self._keepalive_s
        while self._idle and next(iter(self._idle.values())) <= latest:
            self._idle.popitem(last=False)[0].leave()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(IDLE_CHECK_S, self._close_idle) if self._idle else None

    def drain(self) -> None:
        """Tell all clients to send further requests elsewhere. Those that cannot be told hear it with an answer."""
        for client in list(self._open):
            client.drain()

    async def close(self, seconds_max: float) -> None:
        """Close connections without an answer, wait up to `seconds_max` for running answers, then close the rest."""
        self.is_closing = True
        for client in list(self._open):
            client.close()
        await asyncio.sleep(0)  # What they send last leaves at the end of this iteration of the event loop.
        if tasks := [task for one in self._open for task in one.tasks]:
            await asyncio.wait(tasks, timeout=seconds_max)
        for client in list(self._open):
            client.abort()
        if self._timer is not None:
            self._timer.cancel()
