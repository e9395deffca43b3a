"""Windows of what a client may send. Source: RFC 9113, section 5.2.

That of a stream opens as what it has sent is used, that of the connection as it arrives: so a stream that nobody reads
holds up no other, and holds at most STREAM_WINDOW_BYTES bytes.
"""

LARGEST_WINDOW = 2**31 - 1
"""The largest window that the protocol has."""
WINDOW_DEFAULT = 65_535
"""The window of a connection, and of a stream without a setting."""
STREAM_WINDOW_BYTES = 256 * 1024
"""What a client may send on one stream ahead of its use."""
CONNECTION_WINDOW_BYTES = 1024 * 1024
"""What a client may send on one connection until it hears from us."""


class ReceiveWindow:
    """What one stream or connection may still receive."""

    __slots__ = ("_left", "_size", "_used")

    def __init__(self, size: int) -> None:
        self._size = self._left = size
        self._used = 0

    def take(self, size: int) -> bool:
        """Count what has arrived. Returns False if it is more than was allowed."""
        self._left -= size
        return self._left >= 0

    def use(self, size: int) -> int:
        """Count what is used. Returns by how much the window must be opened now: it is told in large steps."""
        self._used += size
        if 2 * self._used < self._size:
            return 0
        opened, self._used = self._used, 0
        self._left += opened
        return opened
