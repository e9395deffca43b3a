"""Sends answers over HTTP/1.1, one after another on one connection."""

import asyncio
import fcntl
import struct
import sys
import termios
from collections.abc import Callable, Mapping

from services.core.flow.client_flow import ClientBounds
from services.http.server.cork import Cork
from services.http.server.exchange import log_left, taken_within, wait_room
from services.http.server.messages import HttpRequest, Response, stream_head

HIGH_WATER_BYTES = 64 * 1024
"""High-water mark of the transport's buffer: a client with more unsent bytes is slow. The kernel's own buffer, of some
hundred kB, fills first, so a client that reads at all stays below it."""
_INT = struct.Struct("i")


def unsent_bytes(transport: asyncio.Transport) -> int:
    """Bytes that the client has not taken: those in the transport's buffer, and on Linux those in the kernel's.

    The kernel accepts more only when a third of its buffer is free. Without counting it, a client that reads slowly but
    steadily would look like one that does not read.
    """
    size = transport.get_write_buffer_size()
    if sys.platform != "linux" or transport.is_closing():
        return size
    queued = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(_INT.size))
    return size + int(_INT.unpack(queued)[0])


class H1Exchange:
    """The sending half of a connection. See `Exchange`.

    Attributes: `transport`. `has_room`: whether the client is not slow (see HIGH_WATER_BYTES). `on_full`: called during
    a write, when `has_room` becomes false. `on_room`: called when it becomes true again. `keeps_alive`: whether the
    connection takes another request after this answer.
    """

    __slots__ = ("_written_size", "cork", "has_room", "keeps_alive", "on_evicted", "on_full", "on_room", "transport")

    def __init__(self, cork: Cork) -> None:
        self.cork = cork
        self.keeps_alive = self.has_room = True
        self.on_evicted: Callable[[str], None] | None = None  # Never called: a connection has one answer at a time.
        self.on_full: Callable[[], None] | None = None
        self.on_room: Callable[[], None] | None = None
        self.transport: asyncio.Transport
        self._written_size = 0

    # Callbacks of the transport

    def pause_writing(self) -> None:
        self.has_room = False
        if self.on_full is not None:
            self.on_full()

    def resume_writing(self) -> None:
        self.has_room = True
        if self.on_room is not None:
            self.on_room()

    # Sending

    @property
    def is_closing(self) -> Callable[[], bool]:
        return self.transport.is_closing

    def begin_stream(self, request: HttpRequest, fields: Mapping[str, str]) -> bytes:
        if not request.is_chunkable:
            self.keeps_alive = False  # Without chunks, the end of the connection ends the answer.
        return stream_head(fields, is_chunked=request.is_chunkable, is_last=not self.keeps_alive)

    def encode(self, response: Response, request: HttpRequest) -> bytes:
        return response.encode(request, is_last=not self.keeps_alive)

    def send(self, data: bytes) -> None:
        self.cork.write(self.transport, data)

    def write(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(data)
            self._written_size += len(data)

    def unsent_size(self) -> int:
        return self.transport.get_write_buffer_size()

    def hold(self, size: int) -> None:
        """One answer at a time is bounded by its own bounds."""

    def progress(self) -> int:
        return self._written_size - unsent_bytes(self.transport)

    async def finish(self, last: bytes, bounds: ClientBounds, request_id: str) -> None:
        transport = self.transport
        if transport.is_closing():
            log_left(request_id)
            return
        if self.cork.write(transport, last):
            await asyncio.sleep(0)  # Usually, the cork is released in this iteration of the event loop.
            self.cork.flush(transport)
        if not transport.get_write_buffer_size() or transport.is_closing():
            return  # Nothing to wait for, so no timer is needed.
        transport.set_write_buffer_limits(high=0)  # `has_room` becomes true when nothing is unsent.
        await taken_within(bounds, len(last), self, wait_room(self), request_id)
        if not transport.is_closing():
            transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)

    def cut(self) -> None:
        self.transport.abort()
