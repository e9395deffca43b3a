"""Joins a block of header fields from a HEADERS frame and the CONTINUATION frames behind it."""

from services.http.h1.parser import HEAD_BYTES_MAX
from services.http.h2.wire.frames import END_HEADERS, END_STREAM, ErrorCode, Frame, H2Error, StreamError, unpadded

BLOCK_BYTES_MAX = 2 * HEAD_BYTES_MAX
"""A block of header fields, encoded and decoded. One above HEAD_BYTES_MAX is decoded all the same, since later blocks
rest on it, and its request is refused. A larger one ends the connection: to decode it would hold up other streams."""
CONTINUATIONS_MAX = 32
"""CONTINUATION frames of one block. Seven carry the largest block that is decoded."""


class HeaderBlock:
    """A block of which parts may be missing.

    `stream_id`, `is_last`: as the HEADERS frame says. `fault`: why the stream must end once the block is decoded, which
    cannot be left out: later blocks rest on it.
    """

    __slots__ = ("_continuations", "_data", "fault", "is_complete", "is_last", "stream_id")

    def __init__(self, first: Frame) -> None:
        """`first`: the HEADERS frame. Raises H2Error."""
        self.stream_id = first.stream_id
        self.is_last = bool(first.flags & END_STREAM)
        self.is_complete = bool(first.flags & END_HEADERS)
        self.fault: StreamError | None = None
        self._continuations = 0
        self._data = bytearray(unpadded(first))
        if first.depends_on_itself:
            self.fault = StreamError(ErrorCode.PROTOCOL_ERROR, "a stream that depends on itself")

    def add(self, one: Frame) -> None:
        """Add a CONTINUATION frame. Raises H2Error."""
        self._continuations += 1
        if self._continuations > CONTINUATIONS_MAX:
            raise H2Error(ErrorCode.ENHANCE_YOUR_CALM, f"more than {CONTINUATIONS_MAX} CONTINUATION frames")
        if len(self._data) + len(one.payload) > BLOCK_BYTES_MAX:
            raise H2Error(ErrorCode.ENHANCE_YOUR_CALM, f"a block of header fields of more than {BLOCK_BYTES_MAX} bytes")
        self._data += one.payload
        self.is_complete = bool(one.flags & END_HEADERS)

    @property
    def data(self) -> bytes:
        return bytes(self._data)
