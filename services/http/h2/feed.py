"""Takes frames out of what arrives on a connection, a few in each iteration of the event loop."""

import asyncio
from abc import ABC, abstractmethod
from typing import Protocol

from services.core.common_layers import bug_failure
from services.http.h2.stream import Receiver, Stream
from services.http.h2.wire.fields import RequestHead
from services.http.h2.wire.frames import ErrorCode, Frame, FrameReader, H2Error
from services.http.h2.writer import FrameWriter
from services.http.server.turn_limits import FrameLimiter


class Owner(Protocol):
    """The connection.

    `tasks`: those that answer requests. `is_reading`: frames are to be handled. `takes_streams`: False: new streams are
    ignored.
    """

    tasks: set[asyncio.Task[None]]

    @property
    def is_reading(self) -> bool: ...

    @property
    def takes_streams(self) -> bool: ...

    def on_open(self, stream: Stream, head: RequestHead) -> Receiver:
        """A request has begun to arrive. Returns what takes its content."""
        ...

    def on_closed(self, stream: Stream) -> None:
        """A stream was closed."""
        ...

    def on_pong(self, payload: bytes) -> None:
        """The client has answered a PING."""
        ...

    def on_broken(self, error: H2Error) -> None:
        """The client has broken the protocol, or passed a bound. No further frame is handled."""
        ...


class FrameFeed(ABC):
    """Hands on the frames of one connection in order. Not more of them than the limiter allows: see `FrameLimiter`."""

    def __init__(self, owner: Owner, writer: FrameWriter, limiter: FrameLimiter) -> None:
        self._owner = owner
        self._writer = writer
        self._reader = FrameReader()
        self._limiter = limiter
        self._is_behind = False
        self._work = 0  # Of this turn, in frames.

    def feed(self, data: bytes) -> None:
        """Handle what has arrived."""
        self._reader.feed(data)
        if not self._is_behind:
            self._handle_some()

    def _handle_some(self) -> None:
        """Handle some of the frames that have arrived, and the rest in another iteration of the event loop."""
        was_behind, self._is_behind, self._work = self._is_behind, True, 0
        self._before_some()
        try:
            while self._work < self._limiter.left:
                one = self._reader.next() if self._owner.is_reading else None
                if one is None:
                    self._is_behind = False
                    break
                self._work += 1
                self._handle(one)
        except H2Error as error:
            self._is_behind = False
            self._owner.on_broken(error)
        except Exception as error:  # A bug with one client must not cost the others their turn.
            self._is_behind = False
            bug_failure(error, "(any) of a client over HTTP/2")
            self._owner.on_broken(H2Error(ErrorCode.INTERNAL_ERROR, "an internal error"))
        self._limiter.spend(self._work)
        self._after_some()
        self._writer.flush()
        if self._is_behind:
            self._writer.transport.pause_reading()
            self._limiter.wait(self._handle_some)
        elif was_behind and not self._writer.transport.is_closing():
            self._writer.transport.resume_reading()

    @abstractmethod
    def _handle(self, one: Frame) -> None:
        """Handle a frame. One that costs as much as several adds to `_work`. Raises H2Error."""

    @abstractmethod
    def _before_some(self) -> None:
        """Called before the frames of a turn."""

    @abstractmethod
    def _after_some(self) -> None:
        """Called after the frames of a turn."""
