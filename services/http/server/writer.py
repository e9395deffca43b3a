"""Writes the last bytes of a response, and waits a bounded time until the client has taken them."""

import asyncio
import fcntl
import struct
import sys
import termios
from collections.abc import Coroutine

import structlog

from services.core.client_flow import ClientBounds, StallWatch
from services.core.errors import Reason
from services.http.server.connection import HIGH_WATER_BYTES, Connection

log = structlog.get_logger()

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


async def finish_writing(connection: Connection, last: bytes, bounds: ClientBounds, request_id: str) -> None:
    """Write the last bytes of a response, and wait until all are sent.

    A client that does not take them within `ClientBounds.drain_s`, or takes nothing for `stall_s_max`, is disconnected
    and logged.
    """
    transport = connection.transport
    if transport.is_closing():
        _log_left(request_id)
        return
    if connection.cork.write(transport, last):
        await asyncio.sleep(0)  # Usually, the cork is released in this iteration of the event loop.
        connection.cork.flush(transport)
    if not transport.get_write_buffer_size() or transport.is_closing():
        return  # Nothing to wait for, so no timer is needed.
    transport.set_write_buffer_limits(high=0)  # `has_room` becomes true when nothing is unsent.
    await _within_bounds(connection.wait_room(), transport, bounds, len(last), request_id)
    if not transport.is_closing():
        transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)


async def _within_bounds(
    sending: Coroutine[None, None, None],
    transport: asyncio.Transport,
    bounds: ClientBounds,
    size: int,
    request_id: str,
) -> None:
    """Wait until the client has taken its last `size` bytes, or disconnect it."""
    scope = asyncio.timeout(bounds.drain_s(size))
    clock = asyncio.get_running_loop().time
    watch = StallWatch(bounds.stall_s_max, lambda: _unsent(transport), lambda: scope.reschedule(clock()))
    try:
        async with scope:
            watch.start()
            await sending
    except TimeoutError:
        log.warning("client cut", reason=Reason.SLOW_CLIENT, request_id=request_id)
        transport.abort()
    finally:
        watch.stop()


def _log_left(request_id: str) -> None:
    log.debug("client left before the end of the answer", reason=Reason.CANCELLED, request_id=request_id)


def _unsent(transport: asyncio.Transport) -> int | None:
    return unsent_bytes(transport) if transport.get_write_buffer_size() else None
