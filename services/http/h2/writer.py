"""The sending half of a connection: all frames of one turn of the event loop leave in one write.

A message of a running stream costs the head of a frame and two items of a list: no task, no timer, no copy of its own.
"""

import asyncio
from typing import Protocol

from services.http.h1.exchange import HIGH_WATER_BYTES, unsent_bytes
from services.http.h2.bounds.backlogs import Backlogs
from services.http.h2.flow_control import LARGEST_WINDOW, WINDOW_DEFAULT
from services.http.h2.wire.frames import ErrorCode, H2Error, StreamError
from services.http.server.cork import Cork

PUMPED_BYTES_MAX = HIGH_WATER_BYTES
"""Bytes of waiting streams that are sent in one turn of the event loop."""
UNSENT_BYTES_MAX = 1024 * 1024
"""Bytes that wait for a client that does not read, besides the content of streams: heads of answers, and answers to
PING and SETTINGS. Beyond that, the connection is closed."""


class Waiting(Protocol):
    """A stream with content that could not be sent yet."""

    def pump(self, size_max: int) -> int:
        """Send up to `size_max` bytes of it, as its window allows. Returns how many."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether it has more to send, and its own window allows it."""
        ...


class FrameWriter:
    """Collects frames, and writes them.

    Attributes: `out`: what the next write has. `window`: what the client still takes on this connection. `is_full`: the
    transport's buffer is full: streams keep their content. `ready`: streams that wait for the connection alone, in the
    order of their turns. `is_flush_due`: `out` will be written without a further call.
    `sent_count`: pieces with content that were written since it was last set to 0. `backlogs`: what waits, of all
    streams. `idle_count`: items of `out` that are no content, or earn nothing.
    """

    __slots__ = (
        "_cork",
        "_is_pump_due",
        "_is_stopped",
        "_loop",
        "_unsent_size",
        "_written_size",
        "backlogs",
        "idle_count",
        "is_flush_due",
        "is_full",
        "out",
        "ready",
        "sent_count",
        "transport",
        "window",
    )

    def __init__(self, transport: asyncio.Transport, cork: Cork, backlogs: Backlogs) -> None:
        self.transport = transport
        self.backlogs = backlogs
        self.out: list[bytes] = []
        self.window = WINDOW_DEFAULT
        self.is_full = False
        self.ready: dict[Waiting, None] = {}
        self._cork = cork
        self._loop = asyncio.get_running_loop()
        self._is_stopped = self._is_pump_due = False
        self.is_flush_due = False
        self._written_size = self._unsent_size = self.idle_count = self.sent_count = 0
        transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)

    def put(self, data: bytes) -> None:
        """Send a frame, or several, without content of streams."""
        self.out.append(data)
        self.idle_count += 1
        if not self.is_flush_due:
            self.flush_soon()

    def flush_soon(self) -> None:
        """Write when the cork is released, or else in the next iteration of the event loop."""
        self.is_flush_due = True
        if not self._cork.defer(self):
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Write what has been collected."""
        self.is_flush_due = False
        out = self.out
        if not out:
            return
        data, was_full = b"".join(out), self.is_full
        self.sent_count += len(out) - self.idle_count
        self.idle_count = 0
        out.clear()
        if self._is_stopped or self.transport.is_closing():
            return
        self.transport.write(data)
        self._written_size += len(data)
        if was_full:
            self._unsent_size += len(data)
            if self._unsent_size > UNSENT_BYTES_MAX:
                self.transport.abort()

    def abort(self) -> None:
        """Close the connection at once."""
        self.transport.abort()

    def stop(self) -> None:
        """Write what has been collected, and nothing from then on."""
        self.flush()
        self._is_stopped = True

    def progress(self) -> int:
        """A number that changes when the client takes something from this connection."""
        return self._written_size - unsent_bytes(self.transport)

    # Streams that wait

    def wait(self, stream: Waiting) -> None:
        """Send the content of a stream when it is its turn."""
        self.ready[stream] = None
        self._pump_soon()

    def pump(self) -> None:
        """Send content of waiting streams, by turns."""
        self._is_pump_due = False
        left, held = PUMPED_BYTES_MAX, []
        while self.ready and left > 0 and self.window > 0 and not self.is_full:
            stream = next(iter(self.ready))
            del self.ready[stream]
            sent = stream.pump(left)
            left -= sent
            if stream.is_ready and sent:
                self.ready[stream] = None
            elif stream.is_ready:
                held.append(stream)  # The connection has no room for its next message.
        is_behind = bool(self.ready) and left <= 0
        self.ready.update(dict.fromkeys(held))
        self.flush()
        if is_behind:
            self._pump_soon()

    def _pump_soon(self) -> None:
        if self.ready and self.window > 0 and not self.is_full and not self._is_pump_due:
            self._is_pump_due = True
            self._loop.call_soon(self.pump)

    def pause(self) -> None:
        """The transport's buffer is full."""
        self.is_full = True

    def resume(self) -> None:
        """It has room again."""
        self.is_full = False
        self._unsent_size = 0
        if self.ready:
            self.pump()

    def open_window(self, size: int) -> None:
        """The client takes `size` bytes more on this connection. Raises H2Error."""
        if not size:
            raise H2Error(ErrorCode.PROTOCOL_ERROR, "a window that is opened by nothing")
        self.window += size
        if self.window > LARGEST_WINDOW:
            raise H2Error(ErrorCode.FLOW_CONTROL_ERROR, "a window that is opened too far")
        self._pump_soon()


def opened(window: int, size: int) -> int:
    """A stream's window, opened by `size`. Raises StreamError."""
    if window + size > LARGEST_WINDOW:
        raise StreamError(ErrorCode.FLOW_CONTROL_ERROR, "a window that is opened too far")
    return window + size
