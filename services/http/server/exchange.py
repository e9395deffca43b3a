"""The way back to the client of one request, whichever version of HTTP it speaks.

Handlers and streams see nothing else of a connection. HTTP/1.1 answers on the connection itself, HTTP/2 on a stream.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Protocol

import structlog

from services.core.errors import Reason
from services.core.flow.client_flow import ClientBounds, StallWatch
from services.http.server.cork import Cork
from services.http.server.messages import HttpRequest, Response

log = structlog.get_logger()


class Exchange(Protocol):
    """Sends the answer to one request.

    `keeps_alive`: whether the client may send further requests where it sent this one. `has_room`: whether the client
    is not slow. `on_full`: called during a write, when `has_room` becomes false. `on_room`: called when it becomes true
    again. `on_evicted`: called with the reason if the streams of the client's connection leave too much unread
    together, and this one most: nothing more of it is sent.
    """

    keeps_alive: bool
    on_evicted: Callable[[str], None] | None
    on_full: Callable[[], None] | None
    on_room: Callable[[], None] | None

    @property
    def has_room(self) -> bool: ...

    @property
    def cork(self) -> Cork:
        """The cork of all streams: writes of one step of a worker leave together."""
        ...

    @property
    def is_closing(self) -> Callable[[], bool]:
        """Returns whether the client is gone. A property, because it is called for every token."""
        ...

    def begin_stream(self, request: HttpRequest, fields: Mapping[str, str]) -> bytes:
        """Begin a streamed answer. Returns what must be sent before its first bytes, in the same call.

        `fields`: see `stream_fields`.
        """
        ...

    def encode(self, response: Response, request: HttpRequest) -> bytes:
        """Begin an answer that is sent whole. Returns what `finish` must send."""
        ...

    def send(self, data: bytes) -> None:
        """Send with what else one step of a worker brings."""
        ...

    def write(self, data: bytes) -> None:
        """Send at once. Ignored if the client is gone."""
        ...

    def unsent_size(self) -> int:
        """Bytes that wait in this process. Those in the kernel are not counted."""
        ...

    def hold(self, size: int) -> None:
        """Count what waits outside until there is room."""
        ...

    def progress(self) -> int:
        """A number that changes whenever the client takes something, if only `write` sends."""
        ...

    async def finish(self, last: bytes, bounds: ClientBounds, request_id: str) -> None:
        """Send the last bytes, and wait until all are sent.

        A client that does not take them within `ClientBounds.drain_s`, or takes nothing for `stall_s_max`, is cut off
        and logged.
        """
        ...

    def cut(self) -> None:
        """Send nothing more, and tell the client that the answer is not complete."""
        ...


class Sending(Protocol):
    """An answer of which something waits for the client. See `Exchange`."""

    on_evicted: Callable[[str], None] | None

    def unsent_size(self) -> int: ...

    def progress(self) -> int: ...

    def cut(self) -> None: ...


class Slow(Protocol):
    """Something that a client takes. See `Exchange`."""

    on_room: Callable[[], None] | None

    @property
    def has_room(self) -> bool: ...


async def wait_room(outlet: Slow) -> None:
    """Wait until the client is not slow. If it disconnects, the waiting task is cancelled."""
    if not outlet.has_room:
        room = asyncio.Event()
        outlet.on_room = room.set
        await room.wait()
        outlet.on_room = None


async def taken_within(
    bounds: ClientBounds, size: int, exchange: Sending, sending: Coroutine[None, None, None], request_id: str
) -> None:
    """Wait until the client has taken its last `size` bytes (`sending`), or cut it off."""
    scope = asyncio.timeout(bounds.drain_s(size))
    clock = asyncio.get_running_loop().time
    progress: Callable[[], int | None] = lambda: exchange.progress() if exchange.unsent_size() else None  # noqa: E731
    watch = StallWatch(bounds.stall_s_max, progress, lambda: scope.reschedule(clock()))
    exchange.on_evicted = lambda _: scope.reschedule(clock())
    try:
        async with scope:
            watch.start()
            await sending
    except TimeoutError:
        log.warning("client cut", reason=Reason.SLOW_CLIENT, request_id=request_id)
        exchange.cut()
    finally:
        watch.stop()
        exchange.on_evicted = None


def log_left(request_id: str) -> None:
    """Log that the client had gone before its answer was complete."""
    log.debug("client left before the end of the answer", reason=Reason.CANCELLED, request_id=request_id)
