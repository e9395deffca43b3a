"""A client's connection: it reads one request after the other, and has each answered in a task of its own.

It is no HTTP library's: tokens are written straight from a sink into the transport, a stream that lasts for minutes may
cost no more than it must, and a crowd may hold up nobody. What such a library is trusted with is to read requests.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

from services.core.common_layers import bug_failure
from services.core.errors import Failure, Reason
from services.http.server.config import HttpConfig
from services.http.server.cork import Cork
from services.http.server.messages import HttpRequest
from services.http.server.parser import BrokenHead, RequestParser
from services.http.server.start_limiter import StartLimiter
from services.runtime.loop import clock

AHEAD_BYTES_MAX = 64 * 1024
"""Of further requests that come before the answer is sent: a client with more is read no further before that."""
BEHIND_BYTES = 64 * 1024
"""Unsent in the transport's buffer: a client with more is behind. The kernel holds some hundred kB before the first of
them, so nobody who reads is."""
IDLE_LOOK_S = 1.0
"""A connection stays open so much longer, at most, than an idle one may."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class App(Protocol):
    """What is served."""

    @property
    def body_bytes_max(self) -> int:
        """Of a request's body, as it comes."""
        ...

    def is_probe(self, request: HttpRequest) -> bool:
        """Whether it is answered at once, however many others wait."""
        ...

    async def answer(self, request: HttpRequest, connection: "Connection") -> None:
        """Send the answer. Raises nothing but a cancel."""
        ...

    def refusal(self, broken: BrokenHead, headers: Mapping[str, str]) -> bytes:
        """The answer to what is no request. headers: those that could be read, by their names in lower case."""
        ...


class Clients:
    """All connections of a server. Called, it makes one more."""

    def __init__(self, app: App, config: HttpConfig, group: asyncio.TaskGroup, cork: Cork) -> None:
        """group: of the tasks that answer; it ends after `close`. cork: of the streams."""
        self.app = app
        self.config = config
        self.group = group
        self.cork = cork
        self.start_limiter = StartLimiter()
        self.is_closing = False
        self._open: set[Connection] = set()
        self._idle: OrderedDict[Connection, float] = OrderedDict()  # → since when, in loop time
        self._looking: asyncio.TimerHandle | None = None

    def __call__(self) -> "Connection":
        return Connection(self)

    def __len__(self) -> int:
        """How many are connected."""
        return len(self._open)

    def add(self, connection: "Connection") -> None:
        """It is connected."""
        if self.is_closing:  # It was on its way in.
            connection.transport.abort()
            return
        self._open.add(connection)
        self.set_idle(connection)

    def remove(self, connection: "Connection") -> None:
        """It is no longer."""
        self._open.discard(connection)
        self.set_busy(connection)

    def set_idle(self, connection: "Connection") -> None:
        """Nothing is asked on it. Idempotent."""
        self._idle.setdefault(connection, clock())  # It may be already: then its time goes on.
        if self._looking is None:
            self._look()

    def set_busy(self, connection: "Connection") -> None:
        """Something is. Idempotent."""
        self._idle.pop(connection, None)

    def _look(self) -> None:
        """Close those that have been idle for too long, oldest first."""
        latest = clock() - self.config.keepalive_s
        while self._idle and next(iter(self._idle.values())) <= latest:
            self._idle.popitem(last=False)[0].transport.close()
        loop = asyncio.get_running_loop()
        self._looking = loop.call_later(IDLE_LOOK_S, self._look) if self._idle else None

    async def close(self, seconds_max: float) -> None:
        """Let answers end within that time; then cut those that have not."""
        self.is_closing = True
        for connection in self._open - {one for one in self._open if one.task is not None}:
            connection.transport.close()
        if tasks := [one.task for one in self._open if one.task is not None]:
            await asyncio.wait(tasks, timeout=seconds_max)
        for connection in list(self._open):
            connection.cut()
        if self._looking is not None:
            self._looking.cancel()


class Connection(asyncio.Protocol):
    """One client.

    | state | what comes | ends by |
    | --- | --- | --- |
    | idle | is read | the beginning of a request; `keepalive_s` |
    | asking: a part of a request has come | is read | the rest of it; a fault; `body_read_s_max` |
    | answering; or its request waits for its turn | is kept, AHEAD_BYTES_MAX at most | the answer |
    | leaving: the last answer is sent, and no more is understood | is thrown away | the client; `lingering_s_max` |

    A client that leaves has the task of its answer cancelled.

    transport: of the connection. has_room: it has little enough unsent. on_full: called, within a write, when that is
    so no longer; on_room: when it is again. keeps_alive: the connection takes a request after the one that is answered.
    """

    __slots__ = (
        "_ahead",
        "_clients",
        "_is_answering",
        "_is_readable",
        "_reader",
        "_timer",
        "has_room",
        "keeps_alive",
        "on_full",
        "on_room",
        "task",
        "transport",
    )

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._reader: RequestParser | None = None
        self._ahead = b""
        self._timer: asyncio.TimerHandle | None = None
        self._is_answering = False
        self._is_readable = True  # What comes next can be understood.
        self.keeps_alive = self.has_room = True
        self.on_full: Callable[[], None] | None = None
        self.on_room: Callable[[], None] | None = None
        self.task: asyncio.Task[None] | None = None
        self.transport: asyncio.Transport

    @property
    def cork(self) -> Cork:
        """Of all streams: what a step of a worker brings leaves together."""
        return self._clients.cork

    # What the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]  # Not every loop's is of asyncio's class.
        self.transport.set_write_buffer_limits(high=BEHIND_BYTES)
        self._clients.add(self)

    def data_received(self, data: bytes) -> None:
        if self._is_answering:
            self._keep(data)
        elif self._is_readable:
            self._read(data)

    def pause_writing(self) -> None:
        self.has_room = False
        if self.on_full is not None:
            self.on_full()

    def resume_writing(self) -> None:
        self.has_room = True
        if self.on_room is not None:
            self.on_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._clients.remove(self)
        self._stop_timer()
        self._forget_reader()
        self._is_answering = self._is_readable = False
        if self.task is not None:
            self.task.cancel()
            self.task = None  # A cancelled task holds its frames, and they this connection.

    # Asking

    def _read(self, data: bytes) -> None:
        if self._reader is None:
            self._reader = RequestParser(self._clients.app.body_bytes_max)
        self._is_readable = self._reader.feed(data)
        self._go_on()

    def _go_on(self) -> None:
        """With what has come."""
        reader = self._reader
        if reader is not None and reader.requests:
            self._begin(reader)
        elif reader is not None and reader.broken is not None:
            self._refuse(reader, reader.broken)
        elif self._ahead:
            ahead, self._ahead = self._ahead, b""
            self.transport.resume_reading()
            self._read(ahead)
        elif reader is not None and reader.is_midway:
            self._wait_for_rest(reader)
        else:
            self._clients.set_idle(self)

    def _wait_for_rest(self, reader: RequestParser) -> None:
        if self._timer is None:
            self._clients.set_busy(self)
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._clients.config.body_read_s_max, self._on_too_slow, reader)
        if reader.wants_continue:
            reader.wants_continue = False
            self.transport.write(_CONTINUE)

    def _on_too_slow(self, reader: RequestParser) -> None:
        within = f"within {self._clients.config.body_read_s_max:g} s"
        self._is_readable = False
        if reader.has_head:
            reader.break_off(Failure(Reason.DEADLINE_EXCEEDED, f"the body did not arrive {within}"))
            self._begin(reader)
        else:
            self._refuse(reader, BrokenHead(408, f"the head of the request did not arrive {within}"))

    def _refuse(self, reader: RequestParser, broken: BrokenHead) -> None:
        self._is_readable = False
        self._stop_timer()
        self._clients.set_busy(self)
        if self.transport.is_closing():
            return
        self.transport.write(self._clients.app.refusal(broken, reader.headers))
        self._leave()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _forget_reader(self) -> None:
        """It takes memory, and knows its parser as that knows it: circles are left to the garbage collector."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    # Answering

    def _begin(self, reader: RequestParser) -> None:
        """Answer the next request, in its turn."""
        self._stop_timer()
        self._clients.set_busy(self)
        self._is_answering = True
        if self._clients.app.is_probe(reader.requests[0]):
            self._start()
        else:
            self._clients.start_limiter.take(self._start)

    def _start(self) -> None:
        if (reader := self._reader) is None or self._clients.is_closing:
            return  # The client has left meanwhile, or will be left.
        self.task = self._clients.group.create_task(self._answer(reader.requests.popleft()))
        if not (reader.requests or reader.is_midway or reader.broken):
            self._forget_reader()  # An answer may take minutes.

    async def _answer(self, request: HttpRequest) -> None:
        """Never raises: a task that fails would end its group, and with it all other answers."""
        self.keeps_alive = request.keeps_alive
        try:
            await self._clients.app.answer(request, self)
            self._after_answer()
        except asyncio.CancelledError:
            self.transport.abort()
            raise
        except Exception as error:
            self.transport.abort()
            bug_failure(error, request.id)

    def _keep(self, data: bytes) -> None:
        self._ahead += data
        if len(self._ahead) >= AHEAD_BYTES_MAX:
            self.transport.pause_reading()

    async def wait_room(self) -> None:
        """Until there is room. A client that leaves meanwhile has whoever waits cancelled."""
        if not self.has_room:
            room = asyncio.Event()
            self.on_room = room.set
            await room.wait()

    def _after_answer(self) -> None:
        self.task = self.on_room = None
        self._is_answering = False
        if self.transport.is_closing():
            return
        if self._clients.is_closing or not self.keeps_alive:
            self._leave()
        else:
            self._go_on()

    # Leaving

    def _leave(self) -> None:
        """Say no more. A client that was still sending would lose the answer if it were not listened to."""
        if self._is_readable and not self._ahead:
            self.transport.close()
            return
        self._is_readable = False
        self._ahead = b""
        with suppress(OSError):  # The client may have left, which is heard of later.
            self.transport.write_eof()
        self.transport.resume_reading()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._clients.config.lingering_s_max, self.transport.abort)

    def cut(self) -> None:
        """Leave at once, whatever runs."""
        self.transport.abort()
        if self.task is not None:
            self.task.cancel()
