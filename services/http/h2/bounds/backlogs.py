"""What waits for the client on all streams of one connection together, and its bound."""

from typing import Protocol


class Holder(Protocol):
    """A stream for which something waits."""

    def evict(self, why: str) -> None:
        """Drop what waits: no more of it is sent, and the answer ends with SLOW_CLIENT."""
        ...


class Backlogs:
    """Sizes by stream. If they pass the bound together, the stream with most is evicted.

    The only stream for which something waits is bounded by its own bounds alone: an answer that is sent whole may be
    larger than all of this.
    """

    __slots__ = ("_bytes_max", "_sizes", "size")

    def __init__(self, bytes_max: int) -> None:
        """`bytes_max`: what may wait on all streams together."""
        self._bytes_max = bytes_max
        self._sizes: dict[Holder, int] = {}
        self.size = 0

    def set(self, holder: Holder, size: int) -> None:
        """So much waits for the stream now. It may be evicted during the call."""
        self.size += size - self._sizes.get(holder, 0)
        if size:
            self._sizes[holder] = size
        else:
            self._sizes.pop(holder, None)
        while self.size > self._bytes_max and len(self._sizes) > 1:
            largest = max(self._sizes, key=self._sizes.__getitem__)
            self.set(largest, 0)
            largest.evict(f"the client left more than {self._bytes_max} bytes unread on the streams of its connection")
