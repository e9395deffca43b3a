"""The connection of one client: reads requests one after another, and answers each in a task of its own.

An HTTP library would not do: a sink writes tokens directly to the transport, a stream of minutes must hold little
memory, and thousands of new requests must not delay other streams. Only parsing is left to a library (see parser.py).
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from services.core.common_layers import bug_failure
from services.core.errors import Failure, Reason
from services.http.h1.exchange import HIGH_WATER_BYTES, H1Exchange
from services.http.h1.parser import RequestParser
from services.http.server.config import PROBE_PATHS
from services.http.server.context import BrokenHead, ConnectionContext
from services.http.server.messages import HttpRequest

PIPELINED_BYTES_MAX = 64 * 1024
"""Bytes of pipelined requests that are buffered while an answer is sent. Beyond that, reading pauses."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Connection(H1Exchange, asyncio.Protocol):
    """One client.

    | state | event | next state |
    | --- | --- | --- |
    | idle | a request arrives | answering |
    | idle | a part of a request arrives | reading |
    | idle | bytes arrive that are not a request | lingering |
    | idle | `keepalive_s` passes | closed |
    | reading | the rest arrives | answering |
    | reading | the head is complete and refused, the body is not complete | answering |
    | reading | bytes arrive that are not a request | lingering |
    | reading | `body_read_s_max` passes, the head is incomplete | lingering |
    | reading | `body_read_s_max` passes, the body is incomplete | answering |
    | answering | the answer is sent | idle |
    | answering | the answer is sent, the next request is buffered | answering |
    | answering | the answer is sent, a part of the next request is buffered | reading |
    | answering | the last answer is sent | closed |
    | answering | the last answer is sent, more bytes are buffered | lingering |
    | answering | the client disconnects | closed |
    | answering | the server closes, the request has not begun | closed |
    | lingering | bytes arrive | lingering |
    | lingering | the client disconnects | closed |
    | lingering | `lingering_s_max` passes | closed |

    Bytes that arrive are parsed while the connection is idle or reading, buffered up to PIPELINED_BYTES_MAX while it is
    answering, and discarded while it is lingering. A request that waits to start counts as answering. If the client
    disconnects, the task of its answer is cancelled.

    `task`: of the answer.
    """

    __slots__ = (
        "_context",
        "_is_answering",
        "_is_readable",
        "_only_request",
        "_parser",
        "_pipelined",
        "_timer",
        "task",
    )

    def __init__(self, context: ConnectionContext, only_request: bytes | None = None) -> None:
        """`only_request`: the one request that it answers; None: it reads its requests."""
        super().__init__(context.cork)
        self._context = context
        self._only_request = only_request
        self._parser: RequestParser | None = None
        self._pipelined = b""
        self._timer: asyncio.TimerHandle | None = None
        self._is_answering = False
        self._is_readable = True  # False: later bytes cannot be parsed.
        self.task: asyncio.Task[None] | None = None

    @property
    def tasks(self) -> Sequence[asyncio.Task[None]]:
        return () if self.task is None else (self.task,)

    @property
    def state(self) -> str:
        """The state, by its name in the table."""
        if self.transport.is_closing():
            return "closed"
        if self._is_answering:
            return "answering"
        if not self._is_readable:
            return "lingering"
        return "reading" if self._parser is not None and self._parser.is_midway else "idle"

    # Callbacks of the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]  # uvloop's transports are not of asyncio's class.
        self.transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        self._context.clients.add(self)
        if self._only_request is not None:
            self.data_received(self._only_request)

    def data_received(self, data: bytes) -> None:
        if self._is_answering:
            self._keep(data)
        elif self._is_readable:
            self._parse(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._context.clients.remove(self)
        self._stop_timer()
        self._release_parser()
        self._is_answering = self._is_readable = False
        if self.task is not None:
            self.task.cancel()
            self.task = None  # Breaks a reference cycle: task, frames, connection.

    # Reading

    def _parse(self, data: bytes) -> None:
        if self._parser is None:
            self._parser = RequestParser(self._context.app.body_bytes_max, self._context.app.on_head)
        self._is_readable = self._parser.feed(data)
        self._proceed()

    def _proceed(self) -> None:
        """Do what the received bytes ask for."""
        parser = self._parser
        if parser is not None and parser.requests:
            self._begin(parser)
        elif parser is not None and parser.broken is not None:
            self._refuse(parser, parser.broken)
        elif self._pipelined:
            pipelined, self._pipelined = self._pipelined, b""
            self.transport.resume_reading()
            self._parse(pipelined)
        elif parser is not None and parser.is_midway:
            self._wait_for_rest(parser)
        else:
            self._context.clients.set_idle(self)

    def _wait_for_rest(self, parser: RequestParser) -> None:
        if self._timer is None:
            self._context.clients.set_busy(self)
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._context.config.body_read_s_max, self._on_read_timeout, parser)
        if parser.wants_continue:
            parser.wants_continue = False
            self.transport.write(_CONTINUE)

    def _on_read_timeout(self, parser: RequestParser) -> None:
        within = f"within {self._context.config.body_read_s_max:g} s"
        self._is_readable = False
        if parser.has_head:
            parser.break_off(Failure(Reason.DEADLINE_EXCEEDED, f"the body did not arrive {within}"))
            self._begin(parser)
        else:
            self._refuse(parser, BrokenHead(408, f"the head of the request did not arrive {within}"))

    def _refuse(self, parser: RequestParser, broken: BrokenHead) -> None:
        self._is_readable = False
        self._stop_timer()
        self._context.clients.set_busy(self)
        if self.transport.is_closing():
            return
        request, response = self._context.app.refusal(broken, parser.headers)
        self.transport.write(response.encode(request, is_last=True))
        self._leave()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _release_parser(self) -> None:
        """Free the parser's memory at once. It is part of a reference cycle, which the garbage collector frees late."""
        if self._parser is not None:
            self._parser.close()
            self._parser = None

    # Answering

    def _begin(self, parser: RequestParser) -> None:
        """Answer the next request: a probe at once, any other when the start limiter allows."""
        self._stop_timer()
        self._context.clients.set_busy(self)
        self._is_answering = True
        if parser.requests[0].path in PROBE_PATHS:
            self._start()
        else:
            self._context.start_limiter.start(self._start)

    def _start(self) -> None:
        if (parser := self._parser) is None or self._context.clients.is_closing:
            return  # The client has disconnected, or the server closes the connection.
        self.task = self._context.group.create_task(self._answer(parser.requests.popleft()))
        if not (parser.requests or parser.is_midway or parser.broken):
            self._release_parser()  # An answer may take minutes.

    async def _answer(self, request: HttpRequest) -> None:
        """Never raises an Exception: it would end the task group, and with it all other answers."""
        self.keeps_alive = request.keeps_alive and self._only_request is None
        try:
            await self._context.app.answer(request, self)
            self._after_answer()
        except asyncio.CancelledError:
            self.transport.abort()
            raise
        except Exception as error:
            self.transport.abort()
            bug_failure(error, request.id)

    def _keep(self, data: bytes) -> None:
        self._pipelined += data
        if len(self._pipelined) >= PIPELINED_BYTES_MAX:
            self.transport.pause_reading()

    def _after_answer(self) -> None:
        self.task = self.on_room = None
        self._is_answering = False
        if self.transport.is_closing():
            return
        if self._context.clients.is_closing or not self.keeps_alive:
            self._leave()
        else:
            self._proceed()

    # Closing

    def _leave(self) -> None:
        """Send nothing more. Closing while the client still sends would reset the connection, and lose the answer."""
        has_more = not self._is_readable or bool(self._pipelined)
        if not has_more or self._only_request is not None:  # The latter has a descriptor that others need.
            self.transport.close()
            return
        self._is_readable = False
        self._pipelined = b""
        with suppress(OSError):  # The client may have disconnected already.
            self.transport.write_eof()
        self.transport.resume_reading()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._context.config.lingering_s_max, self.transport.abort)

    def drain(self) -> None:
        """HTTP/1.1 tells a client with an answer: see `keeps_alive`."""

    def leave(self) -> None:
        self.transport.close()

    def close(self) -> None:
        if self.task is not None:
            return
        if self._is_answering and self._parser is not None and not self.transport.is_closing():
            request = self._parser.requests.popleft()  # It waits for its turn.
            self.transport.write(self._context.app.closing(request).encode(request, is_last=True))
        self.leave()

    def abort(self) -> None:
        """Close the connection at once, and cancel the running answer."""
        self.transport.abort()
        if self.task is not None:
            self.task.cancel()
