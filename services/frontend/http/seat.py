"""A client's connection: aiohttp's while the client asks, its stream's own while an answer is streamed that lasts.

For as long as a handler runs aiohttp keeps what it made of the request: a parser, a reader, headers, two tasks, some
10 KB. A stream needs none of that, and may last for minutes. So once it has lasted for a while, its connection is taken
from aiohttp, which takes it for closed; the next request on it finds a handler of its own.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine

from aiohttp import web

FRESH_S = 0.5
"""How long a stream lasts before its connection is taken over: a handler of aiohttp's costs as much as some tokens."""
LOOK_S = 0.1
TAKEN_OVER_MAX = 128
"""At a look: some milliseconds."""
AHEAD_BYTES_MAX = 64 * 1024
"""Of further requests that come while an answer is streamed: a client with more is read no further before its end."""
_HEAD_END = b"\r\n\r\n"
_UNKNOWN = -1


class Seats:
    """Where connections sit. make_handler: of aiohttp's. group: of the streams' tasks; it ends after `close`."""

    def __init__(self, make_handler: Callable[[], asyncio.Protocol], group: asyncio.TaskGroup) -> None:
        self.make_handler = make_handler
        self.is_closing = False
        self._group = group
        self._streaming: set[Seat] = set()
        self._fresh: OrderedDict[Seat, float] = OrderedDict()  # Those with a handler still → since when they stream.
        self._looking: asyncio.TimerHandle | None = None

    def __call__(self) -> "Seat":
        """For one more connection."""
        return Seat(self)

    def start(self, seat: "Seat", streaming: Coroutine[None, None, None]) -> "asyncio.Task[None]":
        """Run it. Not once they are closing: nobody would wait for it."""
        assert not self.is_closing
        loop = asyncio.get_running_loop()
        self._streaming.add(seat)
        self._fresh[seat] = loop.time()
        if self._looking is None:
            self._looking = loop.call_later(LOOK_S, self._look)
        return self._group.create_task(streaming)

    def forget(self, seat: "Seat") -> None:
        """It does not stream any more. Idempotent."""
        self._streaming.discard(seat)
        self._fresh.pop(seat, None)

    def _look(self) -> None:
        """Take over those that are fresh no more, oldest first."""
        loop = asyncio.get_running_loop()
        latest, left = loop.time() - FRESH_S, TAKEN_OVER_MAX
        while left and self._fresh and next(iter(self._fresh.values())) <= latest:
            self._fresh.popitem(last=False)[0].take_over()
            left -= 1
        self._looking = loop.call_later(LOOK_S, self._look) if self._fresh else None

    async def close(self, seconds_max: float) -> None:
        """Let streams end within that time; then cancel them."""
        self.is_closing = True
        if tasks := [seat.task for seat in self._streaming if seat.task is not None]:
            await asyncio.wait(tasks, timeout=seconds_max)
        for task in tasks:
            task.cancel()
        if self._looking is not None:
            self._looking.cancel()


class Seat(asyncio.Protocol):
    """One connection.

    | state | what comes | the client leaves | ends by |
    | --- | --- | --- | --- |
    | asking: a handler of aiohttp's has it | is the handler's | the handler is cancelled | `stream` |
    | fresh: an answer is streamed | is the handler's | it and the stream are cancelled | `end`, `take_over` |
    | taken over: aiohttp has nothing of it | is kept, AHEAD_BYTES_MAX at most | the stream is cancelled | `end` |

    transport: of the connection. on_room: called when there is room again after the transport had too much unsent.
    """

    __slots__ = (
        "_ahead",
        "_body_bytes",
        "_handler",
        "_is_alone",
        "_is_paused",
        "_keeps_alive",
        "_seats",
        "on_room",
        "task",
        "transport",
    )

    def __init__(self, seats: Seats) -> None:
        self._seats = seats
        self._handler: asyncio.Protocol | None = seats.make_handler()
        self._body_bytes: int | None = None  # That have come of the request; None: nothing of it has.
        self._is_alone = False
        self._ahead = b""
        self._is_paused = self._keeps_alive = False
        self.on_room: Callable[[], None] | None = None
        self.task: asyncio.Task[None] | None = None
        self.transport: asyncio.Transport

    # What the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        assert self._handler is not None, "nothing has been asked yet"
        self.transport = transport
        self._handler.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._handler is None:
            self._keep(data)
            return
        self._is_alone = False
        if self._body_bytes is None:
            head_end = data.find(_HEAD_END)
            self._body_bytes = len(data) - head_end - len(_HEAD_END) if head_end >= 0 else _UNKNOWN
        elif self._body_bytes != _UNKNOWN:
            self._body_bytes += len(data)
        self._handler.data_received(data)

    def _keep(self, data: bytes) -> None:
        self._ahead += data
        if len(self._ahead) >= AHEAD_BYTES_MAX:
            self.transport.pause_reading()

    def pause_writing(self) -> None:
        self._is_paused = True
        if self._handler is not None:
            self._handler.pause_writing()

    def resume_writing(self) -> None:
        self._is_paused = False
        if self._handler is not None:
            self._handler.resume_writing()
        if self.on_room is not None:
            self.on_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._seats.forget(self)
        if self._handler is not None:
            self._handler.connection_lost(exc)
        if self.task is not None:
            self.task.cancel()
            self.task = None  # A cancelled task holds its frames, and they this seat.

    # What handlers and streams call

    @property
    def has_room(self) -> bool:
        """Whether the transport has little enough unsent."""
        return not self._is_paused

    async def wait_room(self) -> None:
        """Until there is room. A client that leaves meanwhile has the stream cancelled."""
        if self._is_paused:
            room = asyncio.Event()
            self.on_room = room.set
            await room.wait()

    def answered(self, content_length: int | None) -> None:
        """A response that is no stream is sent. content_length: of its request. What comes next is another one.

        Unless more had come than that: then nobody but aiohttp knows where one ends, from now on.
        """
        self._body_bytes = None if self._body_bytes == (content_length or 0) else _UNKNOWN

    async def stream(self, streaming: Coroutine[None, None, None], content_length: int | None) -> bool:
        """Run it in a task of its own, which ends with `end`. Returns whether the connection takes the next request.

        content_length: of the request, which has been read. When the connection is taken over, aiohttp cancels whoever
        waits here, but not the stream. Once seats are closing it runs in its handler's task, which aiohttp ends.
        """
        self._is_alone = self._body_bytes == (content_length or 0)
        self._keeps_alive = False
        if self._seats.is_closing:
            await streaming
        else:
            self.task = self._seats.start(self, streaming)
            await asyncio.wait([self.task])
        return self._keeps_alive

    def take_over(self) -> None:
        """Take the connection from aiohttp. Not if there is something behind the request: aiohttp has read that."""
        if not self._is_alone:
            return
        handler, self._handler = self._handler, None
        assert isinstance(handler, web.RequestHandler), "it is taken over once"
        handler.transport = None  # Else it would close the connection.
        handler.connection_lost(None)

    def end(self, *, keeps_alive: bool) -> None:
        """The answer is sent. keeps_alive: the connection takes the next request."""
        self._seats.forget(self)
        self.task = self.on_room = None
        self._keeps_alive = keeps_alive
        self._body_bytes = None if self._is_alone else _UNKNOWN  # Now, for the next request may come at once.
        if self._handler is not None:
            return  # Its handler waits for that.
        if self._seats.is_closing or not keeps_alive or self.transport.is_closing():
            self.transport.close()
        else:
            self._give_back()

    def _give_back(self) -> None:
        self._handler = self._seats.make_handler()
        self._handler.connection_made(self.transport)
        if self._ahead:
            ahead, self._ahead = self._ahead, b""
            self.transport.resume_reading()
            self.data_received(ahead)


def seat_of(request: web.Request) -> Seat:
    """Where the request came from. Asked while the client is there."""
    assert request.transport is not None, "aiohttp cancels the handler of a client that has left"
    seat = request.transport.get_protocol()
    assert isinstance(seat, Seat), "the door gives seats"
    return seat
