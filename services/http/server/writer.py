"""The end of every response: its last bytes, within a bound."""

import asyncio
import fcntl
import struct
import sys
import termios
from collections.abc import Coroutine

import structlog

from services.core.client_flow import ClientBounds, StallWatch
from services.core.errors import Reason
from services.http.server.connection import BEHIND_BYTES, Connection

log = structlog.get_logger()

_COUNT = struct.Struct("i")


def unsent_bytes(transport: asyncio.Transport) -> int:
    """What the client has not taken: what we hold for it, and on Linux also what the kernel does.

    The kernel asks us for more only once a third of what it holds is gone: without it a client that reads a little all
    the time would look as one that does not read.
    """
    size = transport.get_write_buffer_size()
    if sys.platform != "linux" or transport.is_closing():
        return size
    queued = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(_COUNT.size))
    return size + int(_COUNT.unpack(queued)[0])


def drain_s(bounds: ClientBounds, size: int) -> float:
    """How long a client may take for the last `size` bytes.

    `drain_s_max` for as many as may be unsent of a stream; in proportion for a larger body, so that the pace asked of
    its client is no other.
    """
    return bounds.drain_s_max * max(1.0, size / bounds.buffer_bytes_max)


async def finish_writing(connection: Connection, last: bytes, bounds: ClientBounds, request_id: str) -> None:
    """Write the last bytes of an answer, and wait until nothing is unsent.

    A client that does not take them in time, or takes nothing at all for `stall_s_max`, is cut, and logged.
    """
    transport = connection.transport
    if transport.is_closing():
        _note_left(request_id)
        return
    if connection.cork.write(transport, last):
        await asyncio.sleep(0)  # Then it has left with what else leaves in this turn, as a rule.
        connection.cork.release(transport)
    if not transport.get_write_buffer_size() or transport.is_closing():
        return  # There is nothing to wait for, and so no timer.
    transport.set_write_buffer_limits(high=0)  # So there is no room while anything is unsent.
    await _within_bounds(connection.wait_room(), transport, bounds, len(last), request_id)
    if not transport.is_closing():
        transport.set_write_buffer_limits(high=BEHIND_BYTES)


async def _within_bounds(
    sending: Coroutine[None, None, None],
    transport: asyncio.Transport,
    bounds: ClientBounds,
    size: int,
    request_id: str,
) -> None:
    """Let a client take its last `size` bytes, or cut it."""
    scope = asyncio.timeout(drain_s(bounds, size))
    clock = asyncio.get_running_loop().time
    watch = StallWatch(bounds.stall_s_max, lambda: _left(transport), lambda: scope.reschedule(clock()))
    try:
        async with scope:
            watch.start()
            await sending
    except TimeoutError:
        log.warning("client cut", reason=Reason.SLOW_CLIENT, request_id=request_id)
        transport.abort()
    finally:
        watch.stop()


def _note_left(request_id: str) -> None:
    log.debug("client left before the end of the answer", reason=Reason.CANCELLED, request_id=request_id)


def _left(transport: asyncio.Transport) -> int | None:
    return unsent_bytes(transport) if transport.get_write_buffer_size() else None
