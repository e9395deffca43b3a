"""Buffers the stream of a client that reads more slowly than tokens come, and writes once there is room again."""

import asyncio
from collections.abc import Callable

from services.core.flow.client_flow import ClientBounds, StallWatch
from services.core.flow.delta_buffer import DeltaBuffer
from services.core.generation.replay import ReplayRoom
from services.core.interface import Delta
from services.http.server.exchange import Exchange


class Backlog:
    """The unsent part of one stream. It exists, and costs something, only while the client is slow.

    New deltas are merged with the buffered ones; when there is room, `_catch_up` writes them.
    """

    def __init__(
        self,
        exchange: Exchange,
        events_of: Callable[[Delta], bytes],
        bounds: ClientBounds,
        on_slow: Callable[[str], None],
        room: ReplayRoom,
    ) -> None:
        """`on_slow`: called with the reason when the client passes one of `bounds`, besides the `room`."""
        self._exchange = exchange
        self._events_of = events_of
        self._bounds = bounds
        self._on_slow = on_slow
        self._room = room
        self._buffer = DeltaBuffer(exchange.hold)
        self._next: asyncio.Handle | None = None
        self._watch: StallWatch | None = StallWatch(bounds.stall_s_max, self._progress, self._on_stall)
        exchange.on_room = self._catch_up
        self._watch.start()
        self._check()

    @property
    def is_caught_up(self) -> bool:
        """Whether nothing is buffered and there is room."""
        return not self._buffer and self._exchange.has_room

    def deliver(self, delta: Delta) -> None:
        """Write the delta, or buffer it."""
        if self._buffer or not self._exchange.has_room:
            self._room.add(delta, self._buffer.add(delta))
        else:
            self._write(self._events_of(delta))
        self._check()

    def stop(self) -> None:
        """Stop writing, and stop watching the client. Idempotent."""
        if self._watch is not None:
            self._watch.stop()
        self._exchange.on_room = None
        if self._next is not None:
            self._next.cancel()
        self._watch = self._next = None  # Break cycles: what waits need not wait for the garbage collector, too.

    def rest(self) -> bytes:
        """Empties the buffer and returns its events."""
        events = []
        while self._buffer:
            events.append(self._events_of(self._buffer.pop()))
        return b"".join(events)

    def _catch_up(self) -> None:
        """Write one buffered delta in each iteration of the event loop, so that other streams run in between."""
        self._next = None
        if self._buffer and self._exchange.has_room:
            self._write(self._events_of(self._buffer.pop()))
            self._next = asyncio.get_running_loop().call_soon(self._catch_up)

    def _write(self, events: bytes) -> None:
        if events:
            self._exchange.write(events)

    def _check(self) -> None:
        bytes_max = self._bounds.buffer_bytes_max + self._room.size
        if self._exchange.unsent_size() + self._buffer.size > bytes_max:
            self._on_slow(f"the client left more than {bytes_max} bytes of its stream unread")

    def _progress(self) -> int | None:
        return None if self.is_caught_up else self._exchange.progress()

    def _on_stall(self) -> None:
        self._on_slow(f"the client has read nothing of its stream for {self._bounds.stall_s_max:g} s")
