"""Streams that stay open: raw sockets and epoll in one thread, and of each stream the times between its tokens."""

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
"""How finely the opening of streams is spread over time."""


class _Stream:
    """One connection and its one request."""

    __slots__ = ("gaps_s", "has_head", "last_at", "sock")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.has_head = False
        self.last_at: float | None = None
        self.gaps_s = array("f")

    def take(self, count: int, now: float) -> None:
        """So many tokens have come."""
        if self.last_at is not None:
            self.gaps_s.append(now - self.last_at)
        self.gaps_s.extend([0.0] * (count - 1))
        self.last_at = now

    def gaps_until(self, now: float) -> list[float]:
        """Between its tokens; the one that is not over, too, if it is the longest already."""
        gaps, unfinished = self.gaps_s.tolist(), now - (self.last_at or 0.0)
        return [*gaps, unfinished] if unfinished > max(gaps, default=0.0) else gaps


class HeldStreams:
    """The streams of one address; a context: leaving it hangs up.

    errors: of streams that were refused, broke or ended, with how many of each. tokens: since the last `forget`; each
    must come as an event of its own.
    """

    def __init__(self, address: str, message: bytes) -> None:
        """message: the request that each connection makes."""
        host, _, port = address.rpartition(":")
        self._address = host, int(port)
        self._message = message
        self._epoll = select.epoll()
        self._streams: dict[int, _Stream] = {}
        self.errors: Counter[str] = Counter()
        self.begun = 0
        self.tokens = 0

    def open(self, number: int, per_s: float) -> None:
        """Open so many, spread evenly over time."""
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
        sock.send(self._message)  # It fits an empty buffer.
        self._streams[sock.fileno()] = _Stream(sock)
        self._epoll.register(sock, select.EPOLLIN)

    def wait_begun(self, seconds_max: float) -> None:
        """Until each has had its first token, or has failed."""
        give_up_at = time.monotonic() + seconds_max
        while self.begun < len(self._streams) and time.monotonic() < give_up_at:
            self.read(TICK_S)
        self.errors["no token"] += len(self._streams) - self.begun
        self.errors += Counter()  # Without zeros.

    def read(self, seconds: float) -> None:
        """Take what comes, for so long."""
        over_at = time.monotonic() + seconds
        while (left_s := over_at - time.monotonic()) > 0:
            for fd, _ in self._epoll.poll(left_s):
                stream = self._streams[fd]
                try:
                    data = stream.sock.recv(RECEIVE_BYTES)
                except OSError as error:
                    self._lose(fd, str(error))
                else:
                    self._take(stream, fd, data)

    def _take(self, stream: _Stream, fd: int, data: bytes) -> None:
        if why := _why_lost(data, has_head=stream.has_head):
            self._lose(fd, why)
            return
        stream.has_head = True
        if count := data.count(EVENT):
            self.begun += stream.last_at is None
            self.tokens += count
            stream.take(count, time.monotonic())

    def _lose(self, fd: int, why: str) -> None:
        stream = self._streams.pop(fd)
        self.begun -= stream.last_at is not None
        self.errors[why] += 1
        self._epoll.unregister(fd)
        stream.sock.close()

    def forget(self) -> None:
        """Count tokens, and gaps between them, from now on."""
        self.tokens = 0
        for stream in self._streams.values():
            stream.gaps_s = array("f")

    def gaps_s(self) -> list[list[float]]:
        """Of each stream that still is, between its tokens."""
        now = time.monotonic()
        return [stream.gaps_until(now) for stream in self._streams.values()]

    def __enter__(self) -> "HeldStreams":
        return self

    def __exit__(self, *_: object) -> None:
        self._epoll.close()
        for stream in self._streams.values():
            stream.sock.close()


def _why_lost(data: bytes, *, has_head: bool) -> str | None:
    """What of these bytes says that the stream goes no further."""
    if not data:
        return "hung up"
    if not has_head and not data.startswith(OK):
        return data[:SHOWN_BYTES].partition(b"\r\n")[0].decode(errors="replace")
    return next((end.decode() for end in ENDS if end in data), None)
