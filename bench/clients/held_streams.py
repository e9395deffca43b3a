"""Streams that stay open, read by one thread with raw sockets and epoll; records the gaps between their tokens."""

import select
import socket
import time
from array import array
from collections import Counter

from bench.clients.client_pool import RECEIVE_BYTES
from bench.clients.wires import SHOWN_BYTES

EVENT = b"data: "
ENDS = (b"event: error", b"[DONE]")
OK = b"HTTP/1.1 200 "
TICK_S = 0.01
"""Interval between two batches of new streams."""


class _Stream:
    """One connection with its only request."""

    __slots__ = ("gaps_s", "has_head", "last_at", "sock")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.has_head = False
        self.last_at: float | None = None
        self.gaps_s = array("f")

    def record_tokens(self, count: int, now: float) -> None:
        """Record that `count` tokens have arrived."""
        if self.last_at is not None:
            self.gaps_s.append(now - self.last_at)
        self.gaps_s.extend([0.0] * (count - 1))
        self.last_at = now

    def gaps_until(self, now: float) -> list[float]:
        """Return the gaps between the tokens, and the current gap if it is already the longest."""
        gaps, unfinished = self.gaps_s.tolist(), now - (self.last_at or 0.0)
        return [*gaps, unfinished] if unfinished > max(gaps, default=0.0) else gaps


class HeldStreams:
    """Streams from one address. As a context manager it closes all connections on exit.

    `errors`: why streams were refused, broke or ended, and how many. `tokens`: since the last `reset`; each must arrive
    as an event of its own.
    """

    def __init__(self, address: str, message: bytes) -> None:
        """`message`: the request to send on each connection."""
        host, _, port = address.rpartition(":")
        self._address = host, int(port)
        self._message = message
        self._epoll = select.epoll()
        self._streams: dict[int, _Stream] = {}
        self.errors: Counter[str] = Counter()
        self.begun = 0
        self.tokens = 0

    def open(self, number: int, per_s: float) -> None:
        """Open `number` streams, spread evenly over time."""
        began, opened = time.monotonic(), 0
        while opened < number:
            due = min(number, int((time.monotonic() - began) * per_s) + 1)
            for _ in range(due - opened):
                self._open_one()
            opened = due
            self.read(TICK_S)

    def _open_one(self) -> None:
        sock = socket.create_connection(self._address)
        sock.setblocking(False)
        sock.send(self._message)  # It fits into an empty socket buffer.
        self._streams[sock.fileno()] = _Stream(sock)
        self._epoll.register(sock, select.EPOLLIN)

    def wait_begun(self, seconds_max: float) -> None:
        """Wait until each stream has received its first token or has failed."""
        give_up_at = time.monotonic() + seconds_max
        while self.begun < len(self._streams) and time.monotonic() < give_up_at:
            self.read(TICK_S)
        self.errors["no token"] += len(self._streams) - self.begun
        self.errors += Counter()  # Drops the zeros.

    def read(self, seconds: float) -> None:
        """Read whatever arrives within this time."""
        over_at = time.monotonic() + seconds
        while (left_s := over_at - time.monotonic()) > 0:
            for fd, _ in self._epoll.poll(left_s):
                stream = self._streams[fd]
                try:
                    data = stream.sock.recv(RECEIVE_BYTES)
                except OSError as error:
                    self._lose(fd, str(error))
                else:
                    self._on_data(stream, fd, data)

    def _on_data(self, stream: _Stream, fd: int, data: bytes) -> None:
        if why := _why_lost(data, has_head=stream.has_head):
            self._lose(fd, why)
            return
        stream.has_head = True
        if count := data.count(EVENT):
            self.begun += stream.last_at is None
            self.tokens += count
            stream.record_tokens(count, time.monotonic())

    def _lose(self, fd: int, why: str) -> None:
        stream = self._streams.pop(fd)
        self.begun -= stream.last_at is not None
        self.errors[why] += 1
        self._epoll.unregister(fd)
        stream.sock.close()

    def reset(self) -> None:
        """Restart the count of tokens and the recording of gaps."""
        self.tokens = 0
        for stream in self._streams.values():
            stream.gaps_s = array("f")

    def gaps_s(self) -> list[list[float]]:
        """Return the gaps of each stream that is still open."""
        now = time.monotonic()
        return [stream.gaps_until(now) for stream in self._streams.values()]

    def __enter__(self) -> "HeldStreams":
        return self

    def __exit__(self, *_: object) -> None:
        self._epoll.close()
        for stream in self._streams.values():
            stream.sock.close()


def _why_lost(data: bytes, *, has_head: bool) -> str | None:
    """Return why the stream cannot continue after these bytes; None if it can."""
    if not data:
        return "hung up"
    if not has_head and not data.startswith(OK):
        return data[:SHOWN_BYTES].partition(b"\r\n")[0].decode(errors="replace")
    return next((end.decode() for end in ENDS if end in data), None)
