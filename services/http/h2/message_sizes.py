"""Where the messages of gRPC end in what waits for a client, so that none of them is cut.

A status behind a part of a message is a broken stream to some clients (grpc-go: Internal, "unexpected EOF"), whatever
it says. So a message waits until both windows have room for all of it, unless it is too large for that.
"""

from collections import deque

from services.http.h2.wire.frames import FRAME_BYTES_MAX

WHOLE_BYTES_MAX = 2 * FRAME_BYTES_MAX
"""A message that is not larger, nor larger than half of the client's window, is sent whole or not at all. Clients open
their window before half of it is used up."""


class MessageSizes:
    """The messages that wait on one stream, in order. `whole_max`: see WHOLE_BYTES_MAX."""

    __slots__ = ("_is_whole", "_rest_size", "_sizes", "whole_max")

    def __init__(self, whole_max: int) -> None:
        self.whole_max = whole_max
        self._sizes: deque[int] = deque()
        self._rest_size = 0  # What waits of a message of which a part was sent.
        self._is_whole = False  # It is to be sent at once.

    def add(self, size: int) -> None:
        """Another message waits."""
        self._sizes.append(size)

    @property
    def is_cut(self) -> bool:
        """Whether a part of a message was sent."""
        return self._rest_size > 0

    @property
    def least(self) -> int:
        """What both windows must allow before anything more is sent."""
        if self._rest_size or not self._sizes or self._sizes[0] > self.whole_max:
            return 1
        return self._sizes[0]

    def next(self, room: int, size_max: int) -> int:
        """The size of the next frame; 0: none may be sent. It counts as sent.

        `room`: of both windows. `size_max`: what should be sent at most; a message that is begun may pass it.
        """
        frame = min(room, FRAME_BYTES_MAX)
        if self._rest_size:
            size = min(self._rest_size, frame if self._is_whole else min(frame, size_max))
            self._rest_size -= size
            return size
        size = 0
        while self._sizes and size < size_max and size + self._sizes[0] <= frame:
            size += self._sizes.popleft()
        if size or size_max <= 0 or not self._sizes or room < self.least:
            return size
        self._is_whole = self._sizes[0] <= self.whole_max
        self._rest_size = self._sizes.popleft()
        return self.next(room, size_max)
