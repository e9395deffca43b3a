"""The receiving half of a connection: handles frames in order, and opens and closes streams.

The state machine is ours, so that no frame passes through more than it needs; only the fields of heads are decoded by a
library. What a client may do without use to anybody has a budget (bounds/budget.py).
"""

from collections.abc import Callable

from services.http.h2.bounds.arrivals import Arrivals
from services.http.h2.bounds.budget import (
    CONTROL_FRAMES_EARNED,
    CONTROL_FRAMES_MAX,
    CONTROL_FRAMES_PER_S,
    RESETS_MAX,
    RESETS_PER_S,
    SMALL_BYTES,
    SMALL_COST,
    STREAMS_A_FRAME,
    Budget,
)
from services.http.h2.feed import FrameFeed, Owner
from services.http.h2.flow_control import CONNECTION_WINDOW_BYTES, WINDOW_DEFAULT, ReceiveWindow
from services.http.h2.settings import INITIAL_WINDOW_SIZE, STREAMS_MAX, settings_in
from services.http.h2.stream import Stream
from services.http.h2.stream_table import StreamTable
from services.http.h2.wire.fields import FieldDecoder, Fields, check_trailers
from services.http.h2.wire.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_STREAM,
    GOAWAY,
    HEADERS,
    LARGEST_STREAM_ID,
    PING,
    PING_SIZE,
    PRIORITY,
    PRIORITY_SIZE,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    ErrorCode,
    Frame,
    H2Error,
    StreamError,
    frame,
    number_in,
    rst_stream,
    unpadded,
    window_update,
)
from services.http.h2.wire.header_block import HeaderBlock
from services.http.h2.writer import FrameWriter
from services.http.server.turn_limits import FrameLimiter

BLOCK_BYTES_A_FRAME = 16
"""Bytes of a block of header fields that cost as much as a frame: hpack decodes Huffman's code in Python."""
OPENED_FRAMES, RESET_FRAMES = 8, 16
"""Frames that a stream costs as much as, when it is opened or reset."""
_OF_STREAMS = frozenset({DATA, HEADERS, PRIORITY, RST_STREAM, CONTINUATION})
_OF_CONNECTIONS = frozenset({SETTINGS, PING, GOAWAY})


class FrameHandler(FrameFeed):
    """Handles the frames of one connection.

    `streams`: those of the connection. `arrivals`: the incomplete requests. `rests`: those that are answered, and whose
    rest is discarded.
    """

    def __init__(
        self, owner: Owner, writer: FrameWriter, arrivals: Arrivals, rests: Arrivals, limiter: FrameLimiter
    ) -> None:
        super().__init__(owner, writer, limiter)
        self.streams = StreamTable()
        self.arrivals = arrivals
        self.rests = rests
        self._fields = FieldDecoder()
        self._window = ReceiveWindow(CONNECTION_WINDOW_BYTES)
        self._stream_window = WINDOW_DEFAULT
        self._block: HeaderBlock | None = None
        self._has_settings = False
        self._control = Budget("frames without content", CONTROL_FRAMES_MAX, CONTROL_FRAMES_PER_S)
        self._resets = Budget("streams that were reset", RESETS_MAX, RESETS_PER_S)

    def _before_some(self) -> None:
        if sent_count := self._writer.sent_count:  # The client will have something to say about it.
            self._writer.sent_count = 0
            self._control.earn(sent_count * CONTROL_FRAMES_EARNED)

    def _after_some(self) -> None:
        self.arrivals.watch()

    def _handle(self, one: Frame) -> None:
        if self._block is not None and (one.kind != CONTINUATION or one.stream_id != self._block.stream_id):
            raise H2Error(ErrorCode.PROTOCOL_ERROR, "a frame within a block of header fields")
        if not self._has_settings:
            if one.kind != SETTINGS or one.flags & ACK:
                raise H2Error(ErrorCode.PROTOCOL_ERROR, "the first frame must be SETTINGS")
            self._has_settings = True
        if one.kind > CONTINUATION:
            self._control.spend()  # An extension that we do not know. Source: RFC 9113, section 4.1.
            return
        if one.kind in (_OF_CONNECTIONS if one.stream_id else _OF_STREAMS):
            raise H2Error(ErrorCode.PROTOCOL_ERROR, f"a frame of type {one.kind} on the stream {one.stream_id}")
        try:
            _HANDLERS[one.kind](self, one)
        except StreamError as error:
            self._end_stream(one.stream_id, error)

    def _end_stream(self, stream_id: int, error: StreamError) -> None:
        """Reset a stream for a fault of its client. Raises H2Error."""
        self._resets.spend()
        stream = self.streams.get(stream_id)
        if stream is not None:
            stream.reset(error.code)
        else:
            self._writer.put(rst_stream(stream_id, error.code))
            if stream_id <= self.streams.last_id:
                self.streams.remove(stream_id, "reset")

    def _on_data(self, one: Frame) -> None:
        size = len(one.payload)
        if not self._window.take(size):
            raise H2Error(ErrorCode.FLOW_CONTROL_ERROR, "more content than the window of the connection allows")
        if increment := self._window.use(size):
            self._writer.put(window_update(0, increment))
        data, is_last = unpadded(one), bool(one.flags & END_STREAM)
        if len(data) < SMALL_BYTES and not is_last:
            self._control.spend(SMALL_COST if data else 1)
        if (stream := self._stream_of(one)) is not None:
            stream.receive(data, size, is_last=is_last)

    def _stream_of(self, one: Frame) -> Stream | None:
        """The stream of a frame; None: the frame is to be ignored. Raises H2Error and StreamError."""
        if (stream := self.streams.get(one.stream_id)) is not None:
            return stream
        self._control.spend()
        match self.streams.past_of(one.stream_id):
            case "idle" if not self._is_beyond(one.stream_id):
                raise H2Error(ErrorCode.PROTOCOL_ERROR, f"a frame on the stream {one.stream_id}, which is not open")
            case "idle" | "reset":
                return None
            case _ if one.kind != DATA:
                return None  # It crossed the end of the stream. Source: RFC 9113, section 5.1, "closed".
            case _:
                raise StreamError(ErrorCode.STREAM_CLOSED, "content on a closed stream")

    def _on_headers(self, one: Frame) -> None:
        self._block = HeaderBlock(one)
        self._proceed()

    def _on_continuation(self, one: Frame) -> None:
        if self._block is None:
            raise H2Error(ErrorCode.PROTOCOL_ERROR, "a CONTINUATION frame without a block that it continues")
        self._block.add(one)
        self._proceed()

    def _proceed(self) -> None:
        """Use the block of header fields once it is complete."""
        block = self._block
        if block is None or not block.is_complete:
            return
        self._block = None
        fields = self._fields.decode(block.data)
        self._work += len(fields) + len(block.data) // BLOCK_BYTES_A_FRAME
        if (stream := self.streams.get(block.stream_id)) is not None:
            self._end_with_trailers(stream, block, fields)
        elif self.streams.past_of(block.stream_id) == "reset" or self._is_beyond(block.stream_id):
            self._control.spend()
        else:
            self._open(block, fields)

    def _is_beyond(self, stream_id: int) -> bool:
        """Whether the client has opened a stream after the second GOAWAY, which it had not seen. It is ignored."""
        return not self._owner.takes_streams and stream_id > self.streams.last_id

    def _end_with_trailers(self, stream: Stream, block: HeaderBlock, fields: Fields) -> None:
        if stream.is_remote_ended:
            raise StreamError(ErrorCode.STREAM_CLOSED, "header fields after the end of the request")
        if block.fault is not None:
            raise block.fault
        if not block.is_last:
            raise StreamError(ErrorCode.PROTOCOL_ERROR, "trailers that do not end the request")
        check_trailers(fields)
        stream.receive_end()

    def _open(self, block: HeaderBlock, fields: Fields) -> None:
        """Open a stream. Raises H2Error and StreamError."""
        self.streams.use_id(block.stream_id)
        if block.fault is not None:
            raise block.fault
        if max(len(self.streams), len(self._owner.tasks)) >= STREAMS_MAX:
            raise StreamError(ErrorCode.REFUSED_STREAM, f"more than {STREAMS_MAX} streams")
        self._work += OPENED_FRAMES
        head = self._fields.head_of(fields)
        stream = Stream(block.stream_id, self._writer, self._stream_window, head.content_length, self._on_closed)
        self.streams.add(stream)
        if not block.is_last:
            self.arrivals.add(stream)
        receiver = self._owner.on_open(stream, head)
        if stream.is_closed:
            return
        stream.receiver = receiver
        if block.is_last:
            stream.receive_end()

    def _on_reset(self, one: Frame) -> None:
        number_in(one.payload)
        if (stream := self._stream_of(one)) is not None:
            self._resets.spend()
            self._work += RESET_FRAMES
            stream.lose()

    def _on_window_update(self, one: Frame) -> None:
        size = number_in(one.payload) & LARGEST_STREAM_ID
        self._control.spend()
        if not one.stream_id:
            self._writer.open_window(size)
        elif (stream := self._stream_of(one)) is not None:
            if not size:
                raise StreamError(ErrorCode.PROTOCOL_ERROR, "a window that is opened by nothing")
            stream.open_window(size)

    def _on_settings(self, one: Frame) -> None:
        self._control.spend()
        if one.flags & ACK:
            if one.payload:
                raise H2Error(ErrorCode.FRAME_SIZE_ERROR, "an acknowledgement with settings")
            return
        settings = settings_in(one.payload)
        if (window := settings.get(INITIAL_WINDOW_SIZE)) is not None:
            self._control.spend(len(self.streams) / STREAMS_A_FRAME)
            self._work += len(self.streams) // STREAMS_A_FRAME
            change, self._stream_window = window - self._stream_window, window
            for stream in self.streams:
                self._change_window(stream, change)
        self._writer.put(frame(SETTINGS, ACK, 0))

    def _change_window(self, stream: Stream, change: int) -> None:
        try:
            stream.open_window(change)
        except StreamError as error:  # RFC 9113, section 6.9.2.
            raise H2Error(error.code, str(error)) from None

    def _on_ping(self, one: Frame) -> None:
        if len(one.payload) != PING_SIZE:
            raise H2Error(ErrorCode.FRAME_SIZE_ERROR, f"a PING of {len(one.payload)} bytes")
        self._control.spend()
        if one.flags & ACK:
            self._owner.on_pong(one.payload)
        else:
            self._writer.put(frame(PING, ACK, 0, one.payload))

    def _on_priority(self, one: Frame) -> None:
        self._control.spend()
        if len(one.payload) != PRIORITY_SIZE:
            raise StreamError(ErrorCode.FRAME_SIZE_ERROR, "a priority of the wrong size")
        if one.depends_on_itself:
            raise StreamError(ErrorCode.PROTOCOL_ERROR, "a stream that depends on itself")

    def _on_push_promise(self, one: Frame) -> None:
        raise H2Error(ErrorCode.PROTOCOL_ERROR, "a client cannot promise a push")

    def _on_goaway(self, one: Frame) -> None:
        self._control.spend()  # The client opens no further streams, and closes once it has its answers.

    # Streams

    def _on_closed(self, stream: Stream, code: ErrorCode | None) -> None:
        self.arrivals.remove(stream)
        self.rests.remove(stream)
        if code is None and stream.is_ended:
            self._resets.earn(1)
        self.streams.remove(stream.id, "ended" if code is None else "reset")
        self._owner.on_closed(stream)

    def refuse_waiting(self) -> None:
        """The server closes: refuse what has not begun."""
        for stream in self.streams:
            stream.receiver.on_closing()

    def lose_streams(self) -> None:
        """The client is gone, or is told to leave: end all streams, and the tasks that answer them, some at a time."""
        self.arrivals.stop()
        self.rests.stop()
        for stream in self.streams:
            if self._limiter.left <= 0:
                self._limiter.wait(self.lose_streams)
                break
            self._limiter.spend(RESET_FRAMES)
            stream.lose()


_HANDLERS: dict[int, Callable[[FrameHandler, Frame], None]] = {
    DATA: FrameHandler._on_data,
    HEADERS: FrameHandler._on_headers,
    PRIORITY: FrameHandler._on_priority,
    RST_STREAM: FrameHandler._on_reset,
    SETTINGS: FrameHandler._on_settings,
    PUSH_PROMISE: FrameHandler._on_push_promise,
    PING: FrameHandler._on_ping,
    GOAWAY: FrameHandler._on_goaway,
    WINDOW_UPDATE: FrameHandler._on_window_update,
    CONTINUATION: FrameHandler._on_continuation,
}
