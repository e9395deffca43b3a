"""Frames: how they are read and written, and the two kinds of errors. Source: RFC 9113, sections 4, 6 and 7."""

import struct
from enum import IntEnum
from typing import NamedTuple

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_BYTES_MAX = 16_384
"""The largest payload of a frame, in both directions: the default, which every peer takes."""
HEAD_SIZE = 9
PRIORITY_SIZE = 5
PING_SIZE = 8
LARGEST_STREAM_ID = 2**31 - 1

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
"""Types of frames."""
ACK = END_STREAM = 0x01
"""Flags."""
END_HEADERS = 0x04
PADDED = 0x08
PRIORITISED = 0x20

_HEAD = struct.Struct(">HBBBI")
_U32 = struct.Struct(">I")
pack_head = _HEAD.pack
"""The head of a frame: the upper two bytes and the lowest byte of its length, type, flags, stream id."""
pack_message_head = struct.Struct(">HBBBIBI").pack
"""The same with the prefix of a gRPC message behind it: whether it is compressed, and its length."""


class ErrorCode(IntEnum):
    """Why a stream or a connection ends. Source: RFC 9113, section 7."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    INTERNAL_ERROR = 0x2
    FLOW_CONTROL_ERROR = 0x3
    SETTINGS_TIMEOUT = 0x4
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    CANCEL = 0x8
    COMPRESSION_ERROR = 0x9
    CONNECT_ERROR = 0xA
    ENHANCE_YOUR_CALM = 0xB


class H2Error(Exception):
    """The peer has broken the protocol, or passed a bound: the connection must end."""

    def __init__(self, code: ErrorCode, why: str) -> None:
        super().__init__(why)
        self.code = code


class StreamError(Exception):
    """A fault that ends one stream. The connection goes on."""

    def __init__(self, code: ErrorCode, why: str) -> None:
        super().__init__(why)
        self.code = code


class Frame(NamedTuple):
    """A frame as it was received."""

    kind: int
    flags: int
    stream_id: int
    payload: bytes

    @property
    def depends_on_itself(self) -> bool:
        """Whether a PRIORITY frame, or a HEADERS frame with a priority, names its own stream.

        Priorities are ignored otherwise. Source: RFC 9113, section 5.3.2; RFC 7540, section 5.3.1.
        """
        if self.kind == HEADERS and not self.flags & PRIORITISED:
            return False
        start = 1 if self.kind == HEADERS and self.flags & PADDED else 0
        return int(_U32.unpack_from(self.payload, start)[0]) & LARGEST_STREAM_ID == self.stream_id


class FrameReader:
    """Cuts the bytes of a connection into frames."""

    __slots__ = ("_at", "_data")

    def __init__(self) -> None:
        self._data = b""
        self._at = 0

    def feed(self, data: bytes) -> None:
        """Add what has arrived. `next` should have returned None, or all of it is copied."""
        self._data = self._data[self._at :] + data if self._at < len(self._data) else data
        self._at = 0

    def next(self) -> Frame | None:
        """The next frame that has arrived whole. Raises H2Error if it is too large."""
        data, at = self._data, self._at
        if len(data) - at < HEAD_SIZE:
            return None
        upper, lowest, kind, flags, stream_id = _HEAD.unpack_from(data, at)
        size = upper << 8 | lowest
        if size > FRAME_BYTES_MAX:
            raise H2Error(ErrorCode.FRAME_SIZE_ERROR, f"a frame of {size} bytes")
        end = at + HEAD_SIZE + size
        if end > len(data):
            return None
        self._at = end
        return Frame(kind, flags, stream_id & LARGEST_STREAM_ID, data[at + HEAD_SIZE : end])


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """A frame."""
    size = len(payload)
    return pack_head(size >> 8, size & 0xFF, kind, flags, stream_id) + payload


def headers_frames(stream_id: int, block: bytes, *, is_last: bool) -> bytes:
    """A block of header fields as one HEADERS frame, and CONTINUATION frames if it is large."""
    flags = END_STREAM if is_last else 0
    if len(block) <= FRAME_BYTES_MAX:
        return frame(HEADERS, flags | END_HEADERS, stream_id, block)
    pieces = [block[at : at + FRAME_BYTES_MAX] for at in range(0, len(block), FRAME_BYTES_MAX)]
    frames = [frame(HEADERS, flags, stream_id, pieces[0])]
    frames += [frame(CONTINUATION, 0, stream_id, piece) for piece in pieces[1:-1]]
    return b"".join([*frames, frame(CONTINUATION, END_HEADERS, stream_id, pieces[-1])])


def rst_stream(stream_id: int, code: ErrorCode) -> bytes:
    """A frame that ends a stream at once."""
    return frame(RST_STREAM, 0, stream_id, _U32.pack(code))


def window_update(stream_id: int, size: int) -> bytes:
    """A frame that lets the peer send `size` bytes more. `stream_id`: 0 is the connection."""
    return frame(WINDOW_UPDATE, 0, stream_id, _U32.pack(size))


def goaway(last_stream_id: int, code: ErrorCode, why: str = "") -> bytes:
    """A frame that says which streams are the last ones. `why`: for people."""
    return frame(GOAWAY, 0, 0, _U32.pack(last_stream_id) + _U32.pack(code) + why.encode())


def number_in(payload: bytes) -> int:
    """The number of a WINDOW_UPDATE or RST_STREAM frame. Raises H2Error if its size is wrong."""
    if len(payload) != _U32.size:
        raise H2Error(ErrorCode.FRAME_SIZE_ERROR, f"a payload of {len(payload)} bytes instead of {_U32.size}")
    return int(_U32.unpack(payload)[0])


def unpadded(one: Frame) -> bytes:
    """The payload of a DATA or HEADERS frame without padding and priority. Raises H2Error."""
    payload, start, end = one.payload, 0, len(one.payload)
    if one.flags & PADDED:
        if not payload:
            raise H2Error(ErrorCode.FRAME_SIZE_ERROR, "a padded frame without the length of its padding")
        start, end = 1, end - payload[0]
    if one.kind == HEADERS and one.flags & PRIORITISED:
        if end - start < PRIORITY_SIZE:
            raise H2Error(ErrorCode.FRAME_SIZE_ERROR, "a priority that is cut short")
        start += PRIORITY_SIZE
    if start > end:
        raise H2Error(ErrorCode.PROTOCOL_ERROR, "more padding than payload")
    return payload[start:end]
