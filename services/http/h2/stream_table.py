"""The streams of one connection: which are open, which were, and which may follow."""

from collections.abc import Iterator
from typing import Literal

from services.http.h2.stream import Stream
from services.http.h2.wire.frames import ErrorCode, H2Error

CLOSED_KEPT = 256
"""Ids of closed streams that are remembered. Frames on a stream that we have reset may be on their way, and are
ignored. On older streams they end the connection or get another reset."""

Past = Literal["idle", "ended", "reset", "skipped"]
"""Why a stream is not open. `reset`: by us. `skipped`: one with a higher id was opened first, or it is long ago."""


class StreamTable:
    """Streams by id."""

    __slots__ = ("_closed", "_open", "last_id")

    def __init__(self) -> None:
        self._open: dict[int, Stream] = {}
        self._closed: dict[int, Past] = {}  # Oldest first.
        self.last_id = 0

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Stream]:
        return iter(list(self._open.values()))

    def get(self, stream_id: int) -> Stream | None:
        """The stream with this id, if it is open."""
        return self._open.get(stream_id)

    def past_of(self, stream_id: int) -> Past:
        """Why the stream is not open."""
        return "idle" if stream_id > self.last_id else self._closed.get(stream_id, "skipped")

    def use_id(self, stream_id: int) -> None:
        """The client opens a stream with this id. Raises H2Error."""
        match self.past_of(stream_id):
            case "idle" if stream_id % 2:
                self.last_id = stream_id
            case "ended":
                raise H2Error(ErrorCode.STREAM_CLOSED, f"the stream {stream_id} is opened again")
            case _:
                raise H2Error(ErrorCode.PROTOCOL_ERROR, f"a new stream cannot have the id {stream_id}")

    def add(self, stream: Stream) -> None:
        """Add a stream whose id is in use."""
        self._open[stream.id] = stream

    def remove(self, stream_id: int, past: Past) -> None:
        """A stream is closed, or was never opened."""
        self._open.pop(stream_id, None)
        self._closed[stream_id] = past
        if len(self._closed) > CLOSED_KEPT:
            del self._closed[next(iter(self._closed))]
