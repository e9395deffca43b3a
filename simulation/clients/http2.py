"""HTTP/2 of a client: one stream on a connection. The frames are those of the library hyperframe, not the product's."""

from collections.abc import Mapping

from hpack import Decoder, Encoder
from hyperframe.frame import (
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from simulation.clients.exchange import Exchange

WINDOW_BYTES = 65_535
SMALL_WINDOW_BYTES = 600
FRAME_BYTES_MAX = 16_384
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEAD_BYTES = 9
_STREAM = 1


class Http2Exchange(Exchange):
    """A slow client has a small window, and opens it only when it reads on.

    A server that sends more than the windows allow is reported as the loss of the connection.
    """

    def __init__(self, *, is_slow: bool) -> None:
        super().__init__(is_slow=is_slow)
        self._decoder = Decoder()
        self._unread = bytearray()
        self._untaken_size = 0
        self._window_bytes = SMALL_WINDOW_BYTES if is_slow else WINDOW_BYTES
        self._is_paused = False

    def send(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> None:
        fields = {":method": method, ":scheme": "http", ":authority": "127.0.0.1", ":path": path}
        fields |= {name.lower(): value for name, value in headers.items()}
        settings = SettingsFrame(settings={SettingsFrame.INITIAL_WINDOW_SIZE: self._window_bytes})
        head = HeadersFrame(_STREAM, Encoder().encode(list(fields.items())), flags=["END_HEADERS"])
        frames: list[Frame] = [settings, head]
        frames += [
            DataFrame(_STREAM, body[start : start + FRAME_BYTES_MAX]) for start in range(0, len(body), FRAME_BYTES_MAX)
        ]
        frames[-1].flags.add("END_STREAM")
        self._write(PREFACE, *(frame.serialize() for frame in frames))

    def _write(self, *pieces: bytes) -> None:
        self._connection.transport.write(b"".join(pieces))

    def _receive(self, data: bytes) -> str:
        self._unread += data
        lost = ""
        while not lost and len(self._unread) >= _HEAD_BYTES:
            frame, size = Frame.parse_frame_header(memoryview(bytes(self._unread[:_HEAD_BYTES])))
            if len(self._unread) < _HEAD_BYTES + size:
                break
            frame.parse_body(memoryview(bytes(self._unread[_HEAD_BYTES : _HEAD_BYTES + size])))
            del self._unread[: _HEAD_BYTES + size]
            lost = self._handle(frame)
        if not self._is_paused:
            self._take()
        return lost

    def _handle(self, frame: Frame) -> str:
        """Returns why the response is lost."""
        if isinstance(frame, HeadersFrame):
            fields: dict[str, str] = dict(self._decoder.decode(frame.data))  # type: ignore[arg-type]
            self.status = int(fields.get(":status", self.status))
        elif isinstance(frame, DataFrame):
            self.body += frame.data
            self._untaken_size += frame.flow_controlled_length
            if self._untaken_size > self._window_bytes:
                return f"{self._untaken_size} bytes came, though the window has {self._window_bytes}"
        elif isinstance(frame, SettingsFrame | PingFrame) and "ACK" not in frame.flags:
            ack = PingFrame(0, frame.opaque_data) if isinstance(frame, PingFrame) else SettingsFrame(0)
            ack.flags.add("ACK")
            self._write(ack.serialize())
        elif isinstance(frame, RstStreamFrame) and not self.has_ended:
            return f"stream reset: {frame.error_code}"
        elif isinstance(frame, GoAwayFrame) and frame.last_stream_id < _STREAM:
            return "refused with GOAWAY"
        self.has_ended |= frame.stream_id == _STREAM and "END_STREAM" in frame.flags
        return ""

    def _take(self) -> None:
        """Let the server send as much again as has come."""
        if (size := self._untaken_size) and not self.has_ended:
            self._untaken_size = 0
            self._write(*(WindowUpdateFrame(stream, size).serialize() for stream in (0, _STREAM)))

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        self._take()
