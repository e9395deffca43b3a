"""The connection of one client over HTTP/2: its life, from the preface to the last stream."""

import asyncio
from contextlib import suppress

import structlog

from services.http.h2.bounds.arrivals import Arrivals
from services.http.h2.bounds.backlogs import Backlogs
from services.http.h2.bounds.keepalive import Keepalive
from services.http.h2.exchange import H2Exchange
from services.http.h2.flow_control import CONNECTION_WINDOW_BYTES, WINDOW_DEFAULT
from services.http.h2.receiving import FrameHandler
from services.http.h2.settings import own_settings
from services.http.h2.stream import Receiver, Stream
from services.http.h2.wire.fields import RequestHead
from services.http.h2.wire.frames import (
    LARGEST_STREAM_ID,
    PING,
    PING_SIZE,
    ErrorCode,
    H2Error,
    frame,
    goaway,
    window_update,
)
from services.http.h2.writer import FrameWriter
from services.http.server.config import GRPC
from services.http.server.context import ConnectionContext

log = structlog.get_logger()

DRAIN_PING = b"draining"
"""Sent with the first GOAWAY, which is in the same write. Once it is answered, the client has both.

It stands before the GOAWAY: python-hyper's h2 takes any frame behind one for a fault, and would lose the end of an
answer that it has read together with them."""
GOAWAY_S_MAX = 1.0
"""How long a client that is told to leave may open further streams, if it does not answer the PING before."""


class H2Connection(asyncio.Protocol):
    """One client. It leaves in two steps, so that no request is lost on its way.

    | state | event | next state |
    | --- | --- | --- |
    | serving | the process drains, no request of the HTTP API is open | leaving |
    | serving | the process drains, one is open | waiting |
    | serving | `keepalive_s` passes without a stream | leaving |
    | serving | the client breaks the protocol or passes a bound | lingering |
    | serving | the client disconnects | closed |
    | waiting | the last request of the HTTP API ends | leaving |
    | waiting | the client breaks the protocol or passes a bound | lingering |
    | leaving | the client answers the PING, a stream is open | left |
    | leaving | the client answers the PING, no stream is open | lingering |
    | leaving | GOAWAY_S_MAX passes, a stream is open | left |
    | leaving | the client breaks the protocol or passes a bound | lingering |
    | left | the last stream ends | lingering |
    | left | the client breaks the protocol or passes a bound | lingering |
    | lingering | the client disconnects | closed |
    | lingering | `lingering_s_max` passes | closed |

    While it is waiting, the client is not told yet: programs on Python's library h2 break all their streams when they
    hear a GOAWAY. Clients of gRPC do not, so rpcs are not waited for. While it is waiting or leaving, new streams are
    served: the application refuses what a draining process does not take, with a reason, and a cancel gets through.
    Once it has left, they are ignored: the second GOAWAY says so, and the client sends them elsewhere. While it is
    lingering, our side has ended, and what arrives is discarded: closing while the client still sends would reset the
    connection, and lose the end of an answer, or the GOAWAY that says what was wrong. See `Host` and `Owner` for the
    attributes.
    """

    def __init__(self, context: ConnectionContext, only_request: bytes | None = None) -> None:
        """`only_request`: the bytes of the one request that it answers, behind the preface; None: it reads its
        requests."""
        self.context = context
        self.tasks: set[asyncio.Task[None]] = set()
        self.heads_size = self.bodies_size = 0
        self.has_probe = False
        self.transport: asyncio.Transport
        self._only_request = only_request
        self._exchanges: set[Stream] = set()
        self._state = "serving"
        self._frames: FrameHandler
        self._writer: FrameWriter
        self._keepalive: Keepalive
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def state(self) -> str:
        """The state, by its name in the table."""
        return "closed" if self.transport.is_closing() else self._state

    # Callbacks of the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]  # uvloop's transports are not of asyncio's class.
        config = self.context.config
        backlogs = Backlogs(config.client.connection_bytes_max)
        self._writer = writer = FrameWriter(self.transport, self.context.cork, backlogs)
        arrivals, rests = Arrivals(config.body_read_s_max), Arrivals(config.lingering_s_max)
        self._frames = FrameHandler(self, writer, arrivals, rests, self.context.frame_limiter)
        self._keepalive = Keepalive(
            lambda: writer.put(frame(PING, 0, 0, bytes(PING_SIZE))), self.transport.abort, writer.progress
        )
        self.context.clients.add(self)
        writer.put(own_settings() + window_update(0, CONNECTION_WINDOW_BYTES - WINDOW_DEFAULT))
        if self._only_request is not None:
            self._frames.feed(self._only_request)
            self._leave_now()

    def data_received(self, data: bytes) -> None:
        if self._state != "lingering":
            self._keepalive.is_heard = True
            self._frames.feed(data)

    def pause_writing(self) -> None:
        self._writer.pause()

    def resume_writing(self) -> None:
        self._writer.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        self.context.clients.remove(self)
        self._stop_timer()
        self._keepalive.stop()
        self._frames.lose_streams()

    # Streams

    @property
    def is_reading(self) -> bool:
        return self._state != "lingering" and not self.transport.is_closing()

    @property
    def takes_streams(self) -> bool:
        return self._state != "left"

    def on_open(self, stream: Stream, head: RequestHead) -> Receiver:
        self.context.clients.set_busy(self)
        self.context.clients.stream_count += 1
        rpcs = self.context.rpcs
        if rpcs is not None and GRPC.match(head.headers.get("content-type", "")):
            receiver: Receiver = rpcs.open(self, stream, head)
            return receiver
        self._exchanges.add(stream)
        return H2Exchange(self, stream, head)

    def on_begun(self, stream: Stream) -> None:
        self._frames.arrivals.remove(stream)

    def on_answered(self, stream: Stream) -> None:
        self._frames.rests.add(stream)
        self._frames.rests.watch()

    def on_closed(self, stream: Stream) -> None:
        self.context.clients.stream_count -= 1
        self._exchanges.discard(stream)
        if self.transport.is_closing():
            return
        if self._state == "waiting" and not self._exchanges:
            self._tell()
        if self._frames.streams:
            return
        if self._state == "left":
            self._end()
        else:
            self.context.clients.set_idle(self)

    # Leaving

    def drain(self) -> None:
        """Have the client send its further requests elsewhere. Idempotent."""
        if self._state != "serving":
            return
        if self._exchanges:
            self._state = "waiting"
        else:
            self._tell()

    def _tell(self) -> None:
        self._state = "leaving"
        self._writer.put(frame(PING, 0, 0, DRAIN_PING) + goaway(LARGEST_STREAM_ID, ErrorCode.NO_ERROR))
        self._timer = self._loop.call_later(GOAWAY_S_MAX, self._leave_now)

    def on_pong(self, payload: bytes) -> None:
        if payload == DRAIN_PING and self._state == "leaving":
            self._leave_now()

    def _leave_now(self) -> None:
        self._stop_timer()
        self._state = "left"
        self._writer.put(goaway(self._frames.streams.last_id, ErrorCode.NO_ERROR))
        if not self._frames.streams:
            self._end()

    def leave(self) -> None:
        """Close the connection, which answers no request."""
        if self._state == "lingering":
            self.transport.abort()
        else:
            self.drain()

    def close(self) -> None:
        self._frames.refuse_waiting()
        if self.tasks:
            self.drain()
        elif self.is_reading:
            self._leave_now()

    def on_broken(self, error: H2Error) -> None:
        log.debug("client broke HTTP/2", code=error.code.name, why=str(error))
        self._writer.put(goaway(self._frames.streams.last_id, error.code, str(error)))
        self._linger()
        self._frames.lose_streams()

    def abort(self) -> None:
        """Close the connection at once, and cancel the running answers."""
        self.transport.abort()
        for task in self.tasks:
            task.cancel()

    def _end(self) -> None:
        """Nothing is left to answer."""
        if self._only_request is None:
            self._linger()
        else:  # It has a descriptor that others need.
            self._writer.flush()
            self.transport.close()

    def _linger(self) -> None:
        """Send nothing more, and wait a while for the client to close."""
        self._writer.stop()
        self._keepalive.stop()
        self._stop_timer()
        self._state = "lingering"
        if self.transport.is_closing():
            return
        with suppress(OSError):  # The client may have disconnected already.
            self.transport.write_eof()
        self._timer = self._loop.call_later(self.context.config.lingering_s_max, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
