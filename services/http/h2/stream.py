"""A stream: both windows, and the content that waits for the client.

| state | event | next state |
| --- | --- | --- |
| open | the client ends its side | half-closed (remote) |
| open | we end ours | half-closed (local) |
| open | either resets it | closed |
| half-closed (remote) | we end ours | closed |
| half-closed (remote) | either resets it | closed |
| half-closed (local) | the client ends its side | closed |
| half-closed (local) | either resets it | closed |

Source: RFC 9113, section 5.1. A stream exists from the head of its request on, and until it is closed. Our side ends
when the last frame is in the connection's write; until then, its content may wait for the client.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

import structlog

from services.core.errors import Reason
from services.http.h1.exchange import HIGH_WATER_BYTES
from services.http.h2.flow_control import STREAM_WINDOW_BYTES, ReceiveWindow
from services.http.h2.message_sizes import WHOLE_BYTES_MAX, MessageSizes
from services.http.h2.wire.frames import (
    DATA,
    END_STREAM,
    FRAME_BYTES_MAX,
    ErrorCode,
    StreamError,
    headers_frames,
    pack_head,
    pack_message_head,
    rst_stream,
    window_update,
)
from services.http.h2.writer import PUMPED_BYTES_MAX, FrameWriter, opened

log = structlog.get_logger()

LOW_WATER_BYTES = HIGH_WATER_BYTES // 4
"""A slow client has room again when no more than this waits, as with asyncio's transports."""
DRIBBLE_BYTES = 256
"""A piece that the client's window has cut to fewer bytes earns no frames (see Budget): it could go on for ever."""
MESSAGE_PREFIX_BYTES = 5
"""Flag and length before each message of gRPC."""


class Receiver(Protocol):
    """What a stream's request is for."""

    def on_data(self, data: bytes) -> None:
        """A piece of content has arrived. `Stream.use` opens the window again."""
        ...

    def on_end(self) -> None:
        """The request is complete."""
        ...

    def on_late(self) -> None:
        """The request has not been complete for `body_read_s_max`."""
        ...

    def on_closing(self) -> None:
        """The server closes the connection. A request that has not begun is refused."""
        ...

    def on_reset(self) -> None:
        """The stream was reset, by either side, or the client has gone. Nothing more can be sent."""
        ...


class SendingHalf(ABC):
    """What a stream sends.

    Attributes: `window`: what the client still takes on this stream. `has_room`: whether the client is not slow (see
    HIGH_WATER_BYTES). `on_full`: called during a send, when `has_room` becomes false. `on_room`: called when it becomes
    true again. `on_sent`: called when nothing waits any more. `on_evicted`: see `Exchange`. `is_ended`: the last
    frame is in the connection's write. `sent_size`: bytes of content in frames so far.
    """

    __slots__ = (
        "_above_size",
        "_is_cut",
        "_is_ending",
        "_is_evicted",
        "_messages",
        "_pending",
        "_trailers",
        "_whole_max",
        "_writer",
        "has_room",
        "id",
        "is_closed",
        "is_ended",
        "on_evicted",
        "on_full",
        "on_room",
        "on_sent",
        "sent_size",
        "window",
    )

    def __init__(self, stream_id: int, writer: FrameWriter, window: int) -> None:
        self.id = stream_id
        self.window = window
        self.has_room = True
        self.is_ended = self.is_closed = False
        self.on_evicted: Callable[[str], None] | None = None
        self.on_full: Callable[[], None] | None = None
        self.on_room: Callable[[], None] | None = None
        self.on_sent: Callable[[], None] | None = None
        self.sent_size = 0
        self._writer = writer
        self._pending = bytearray()
        self._above_size = 0
        self._is_ending = self._is_evicted = self._is_cut = False
        self._messages: MessageSizes | None = None
        self._whole_max = min(WHOLE_BYTES_MAX, window // 2)
        self._trailers = b""

    def send_head(self, block: bytes) -> None:
        """Send the head of the answer. Ignored if the stream is closed: a handler may not have noticed yet."""
        if not self.is_closed:
            self._writer.put(headers_frames(self.id, block, is_last=False))

    def send(self, data: bytes) -> None:
        """Send content, or keep it until the client takes it. Every event takes this path."""
        size, writer = len(data), self._writer
        if self._pending or writer.is_full or not size <= self.window or size > writer.window or size > FRAME_BYTES_MAX:
            self._send_later(data)
            return
        self.window -= size
        writer.window -= size
        self.sent_size += size
        writer.out += (pack_head(size >> 8, size & 0xFF, DATA, 0, self.id), data)
        if not writer.is_flush_due:
            writer.flush_soon()

    def send_message(self, message: bytes, *, flag: int = 0) -> None:
        """Send a message of gRPC with its prefix. Every message takes this path. `flag`: 1: it is compressed."""
        size, writer = len(message) + MESSAGE_PREFIX_BYTES, self._writer
        if self._pending or writer.is_full or not size <= self.window or size > writer.window or size > FRAME_BYTES_MAX:
            self._send_later(flag.to_bytes() + len(message).to_bytes(4, "big") + message, is_message=True)
            return
        self.window -= size
        writer.window -= size
        self.sent_size += size
        head = pack_message_head(size >> 8, size & 0xFF, DATA, 0, self.id, flag, size - MESSAGE_PREFIX_BYTES)
        writer.out += (head, message)
        if not writer.is_flush_due:
            writer.flush_soon()

    def end(self, data: bytes = b"", trailers: bytes = b"") -> None:
        """Send the last content, and trailers (a block of fields) if there are any, and end our side."""
        if self.is_closed:
            return
        if self._is_cut:
            self.reset(ErrorCode.ENHANCE_YOUR_CALM)
            return
        self._trailers = trailers
        self._is_ending = True
        if trailers:
            if data:
                self.send(data)
            if not self._pending:
                self._end()
        else:
            self._pending += data
            self._note_unsent()
            if self._is_evicted:
                return
            if not self._pending or (self.window > 0 and self._writer.window > 0 and not self._writer.is_full):
                self.pump(PUMPED_BYTES_MAX)
            if self.is_ready:
                self._writer.wait(self)

    def end_now(self, trailers: bytes) -> None:
        """End our side with trailers, without the content that waits.

        If a part of a message was sent, the stream is reset instead: to clients of gRPC that is RESOURCE_EXHAUSTED.
        """
        self._drop()
        self.end(trailers=trailers)

    def _send_later(self, data: bytes, *, is_message: bool = False) -> None:
        if self.is_closed or self._is_evicted:
            return
        if is_message:
            self._messages = self._messages or MessageSizes(self._whole_max)
            self._messages.add(len(data))
        self._pending += data
        if self.is_ready:
            self._writer.wait(self)
        self._note_unsent()
        if self.has_room and len(self._pending) > HIGH_WATER_BYTES:
            self.has_room = False
            if self.on_full is not None:
                self.on_full()

    @property
    def is_ready(self) -> bool:
        return bool(self._pending) and self.window >= self._least

    @property
    def _least(self) -> int:
        """What both windows must allow before anything more is sent."""
        return 1 if self._messages is None else self._messages.least

    @property
    def unsent_size(self) -> int:
        """Bytes of content that wait for the client."""
        return len(self._pending)

    def hold(self, size: int) -> None:
        """Bytes that wait above the stream until it has room."""
        self._above_size = size
        self._note_unsent()

    def _note_unsent(self) -> None:
        if not (self.is_closed or self._is_evicted):
            self._writer.backlogs.set(self, len(self._pending) + self._above_size)

    def _drop(self) -> None:
        """Drop what waits."""
        self._is_cut = self._is_cut or (self._messages is not None and self._messages.is_cut)
        self._messages = None
        self._pending.clear()
        self._writer.ready.pop(self, None)
        self._writer.backlogs.set(self, 0)

    def evict(self, why: str) -> None:
        """See `Holder`. Whoever sends is told; without one, the stream is reset."""
        self._is_evicted = True
        self.window = 0  # Whatever is sent from now on is dropped.
        self._drop()
        if self.on_evicted is not None:
            self.on_evicted(why)
        else:
            log.warning("client cut", reason=Reason.SLOW_CLIENT, why=why)
            self.reset(ErrorCode.ENHANCE_YOUR_CALM)

    def pump(self, size_max: int) -> int:
        """Send up to `size_max` bytes that wait, in one frame or in several. Returns how many. See `Waiting`."""
        writer, sent = self._writer, 0
        while (size := self._next_size(size_max - sent)) > 0:
            data = bytes(self._pending[:size])
            del self._pending[:size]
            self.window -= size
            writer.window -= size
            self.sent_size += size
            sent += size
            is_last = self._is_ending and not self._pending and not self._trailers
            flags = END_STREAM if is_last else 0
            writer.out += (pack_head(size >> 8, size & 0xFF, DATA, flags, self.id), data)
            if size < DRIBBLE_BYTES and self._pending:
                writer.idle_count += 2
            if not writer.is_flush_due:
                writer.flush_soon()
            if is_last:
                self._set_ended()
        self._note_unsent()
        if not self._pending and self._is_ending and not self.is_ended:
            self._end()
        self._note_room()
        return sent

    def _next_size(self, size_max: int) -> int:
        """The size of the next frame; 0: none may be sent. See `MessageSizes.next`."""
        room = min(self.window, self._writer.window, len(self._pending))
        if self._messages is None:
            return min(room, size_max, FRAME_BYTES_MAX)
        return self._messages.next(room, size_max)

    def _note_room(self) -> None:
        if not self.has_room and len(self._pending) <= LOW_WATER_BYTES:
            self.has_room = True
            if self.on_room is not None:
                self.on_room()
        if not self._pending and self.on_sent is not None:
            self.on_sent()

    def _end(self) -> None:
        """Send the last frame, which has no content."""
        if self._trailers:
            self._writer.put(headers_frames(self.id, self._trailers, is_last=True))
        else:
            self._writer.put(pack_head(0, 0, DATA, END_STREAM, self.id))
        self._set_ended()

    def _set_ended(self) -> None:
        self.is_ended = True
        self._close_if_ended()

    def open_window(self, size: int) -> None:
        """The client takes `size` bytes more, or fewer if negative. Raises StreamError."""
        if size < 0:
            self._whole_max = 0  # It has lowered its window, maybe to less than a message.
            if self._messages is not None:
                self._messages.whole_max = 0
        if not self._is_evicted:
            self.window = opened(self.window, size)
        if self.is_ready and not self.is_closed:
            self._writer.wait(self)

    def progress(self) -> int:
        """A number that changes when the client takes something.

        If the client's window holds the content up, only the window counts, whatever other streams send.
        """
        is_held_up = min(self.window, self._writer.window) < self._least
        return self.sent_size if is_held_up else self._writer.progress()

    @abstractmethod
    def reset(self, code: ErrorCode) -> None:
        """End the stream at once."""

    @abstractmethod
    def _close_if_ended(self) -> None:
        """Our side has ended."""


class Stream(SendingHalf):
    """One request and its answer. `receiver`: what its content goes to."""

    __slots__ = ("_content_left", "_on_closed", "_received", "is_remote_ended", "receiver")

    def __init__(
        self,
        stream_id: int,
        writer: FrameWriter,
        window: int,
        content_length: int | None,
        on_closed: Callable[["Stream", ErrorCode | None], None],
    ) -> None:
        """`content_length`: as the head says. `on_closed`: called once; with a code if we have reset the stream."""
        super().__init__(stream_id, writer, window)
        self.is_remote_ended = False
        self.receiver: Receiver = _GONE
        self._content_left = content_length
        self._received = ReceiveWindow(STREAM_WINDOW_BYTES)
        self._on_closed = on_closed

    @property
    def state(self) -> str:
        """The state, by its name in the table."""
        if self.is_closed:
            return "closed"
        if self.is_remote_ended:
            return "half-closed (remote)"
        return "half-closed (local)" if self.is_ended else "open"

    # Receiving

    def receive(self, data: bytes, flow_size: int, *, is_last: bool) -> None:
        """A DATA frame has arrived. `flow_size`: with its padding. Raises StreamError."""
        if self.is_remote_ended:
            raise StreamError(ErrorCode.STREAM_CLOSED, "content after the end of the request")
        if not self._received.take(flow_size):
            raise StreamError(ErrorCode.FLOW_CONTROL_ERROR, "more content than the window allows")
        if self._content_left is not None:
            self._content_left -= len(data)
            if self._content_left < 0:
                raise StreamError(ErrorCode.PROTOCOL_ERROR, "more content than Content-Length says")
        if flow_size > len(data):
            self.use(flow_size - len(data))
        if data:
            self.receiver.on_data(data)
        if is_last and not self.is_closed:
            self.receive_end()

    def receive_end(self) -> None:
        """The client has ended its side. Raises StreamError."""
        if self._content_left:
            raise StreamError(ErrorCode.PROTOCOL_ERROR, "less content than Content-Length says")
        self.is_remote_ended = True
        self.receiver.on_end()
        self._close_if_ended()

    def use(self, size: int) -> None:
        """Let the client send as much again: the content is used."""
        if not self.is_remote_ended and not self.is_closed and (increment := self._received.use(size)):
            self._writer.put(window_update(self.id, increment))

    # Closing

    def _close_if_ended(self) -> None:
        if self.is_ended and self.is_remote_ended and not self.is_closed:
            self._close(None)

    def reset(self, code: ErrorCode) -> None:
        """End the stream at once. Nothing happens if it is closed."""
        if not self.is_closed:
            self._writer.put(rst_stream(self.id, code))
            self._close(code).on_reset()

    def lose(self) -> None:
        """The client has reset the stream, or is gone."""
        if not self.is_closed:
            self._close(None).on_reset()

    def _close(self, code: ErrorCode | None) -> Receiver:
        """Returns the receiver, which is let go: a cycle would wait for the garbage collector."""
        self.is_closed = True
        self.window = 0  # Whatever is sent from now on is dropped.
        self._drop()
        self._on_closed(self, code)
        if self.on_sent is not None:
            self.on_sent()
        self.on_evicted = self.on_full = self.on_room = self.on_sent = None
        receiver, self.receiver = self.receiver, _GONE
        return receiver


class _Gone:
    """The receiver of a closed stream, which receives nothing."""

    def on_data(self, data: bytes) -> None:
        """Never called."""

    def on_end(self) -> None:
        """Never called."""

    def on_late(self) -> None:
        """Never called."""

    def on_closing(self) -> None:
        """Never called."""

    def on_reset(self) -> None:
        """Never called."""


_GONE = _Gone()
