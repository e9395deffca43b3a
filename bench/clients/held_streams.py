"""Streams that stay open, read by one thread with raw sockets and epoll; records the gaps between their tokens."""

import select
import socket
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Protocol

from bench.clients.client_pool import RECEIVE_BYTES
from bench.clients.wires import (
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    RST_STREAM,
    SHOWN_BYTES,
    FrameCutter,
    answer_to,
    frame,
    greeting,
    grpc_request_parts,
)

EVENT = b"data: "
ENDS = (b"event: error", b"[DONE]")
OK = b"HTTP/1.1 200 "
_STATUS = b"\x0bgrpc-status"
TICK_S = 0.01
"""Interval between two batches of new streams."""


class HeldWire(Protocol):
    """The protocol of one connection with streams that stay open, each with a number of its own."""

    def next_request(self) -> tuple[int, bytes]:
        """Return the number and the bytes of one more request."""
        ...

    def feed(self, data: bytes) -> Iterator[tuple[int, int | str]]:
        """Yield (number, tokens) for each piece of a stream, or (number, why) for one that cannot continue."""
        ...

    @property
    def reply(self) -> bytes:
        """Return the bytes that the protocol itself has to send."""
        ...


class HeldHttp:
    """HTTP/1.1 with its only request."""

    reply = b""

    def __init__(self, message: bytes) -> None:
        self._message = message
        self._has_head = False

    def next_request(self) -> tuple[int, bytes]:
        return 0, self._message

    def feed(self, data: bytes) -> Iterator[tuple[int, int | str]]:
        if why := _why_lost(data, has_head=self._has_head):
            yield 0, why
            return
        self._has_head = True
        if count := data.count(EVENT):
            yield 0, count


class HeldRpcs:
    """gRPC: many rpcs on one connection."""

    def __init__(self, path: str, message: bytes) -> None:
        self._head, self._content = grpc_request_parts(path, message)
        self._reply = greeting()
        self._last_id = -1
        self._open: set[int] = set()
        self._cutter = FrameCutter()

    @property
    def reply(self) -> bytes:
        reply, self._reply = self._reply, b""
        return reply

    def next_request(self) -> tuple[int, bytes]:
        self._last_id += 2
        self._open.add(self._last_id)
        headers = frame(HEADERS, END_HEADERS, self._last_id, self._head)
        return self._last_id, self.reply + headers + frame(DATA, END_STREAM, self._last_id, self._content)

    def feed(self, data: bytes) -> Iterator[tuple[int, int | str]]:
        for kind, flags, stream_id, payload in self._cutter.feed(data):
            self._reply += answer_to(kind, flags, payload)
            if kind == GOAWAY:
                yield from [(number, "GOAWAY") for number in self._open]
                self._open.clear()
            elif stream_id not in self._open:
                continue
            elif kind == RST_STREAM or flags & END_STREAM:
                self._open.remove(stream_id)
                yield stream_id, "RST_STREAM" if kind == RST_STREAM else _status_in(payload)
            elif kind == DATA and payload:
                yield stream_id, 1  # A message is small, so that it comes in a frame of its own.


class _Stream:
    """What one stream has received."""

    __slots__ = ("gaps_s", "last_at")

    def __init__(self) -> None:
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


class _Connection:
    """One connection with its streams, by number."""

    __slots__ = ("opened", "sock", "streams", "wire")

    def __init__(self, address: tuple[str, int], wire: HeldWire) -> None:
        self.wire = wire
        self.opened = 0
        self.streams: dict[int, _Stream] = {}
        self.sock = socket.create_connection(address)
        self.sock.setblocking(False)

    def open_stream(self) -> None:
        number, request = self.wire.next_request()
        self.streams[number] = _Stream()
        self.opened += 1
        self.send(request)

    def send(self, data: bytes) -> None:
        self.sock.send(data)  # It fits into the socket's buffer, which is as good as empty.


class HeldStreams:
    """Streams from one address. As a context manager it closes all connections on exit.

    `errors`: why streams were refused, broke or ended, and how many. `tokens`: since the last `reset`; each must arrive
    as an event of its own.
    """

    def __init__(self, address: str, wire: Callable[[], HeldWire], per_connection: int = 1) -> None:
        """`per_connection`: streams on each connection."""
        host, _, port = address.rpartition(":")
        self._address = host, int(port)
        self._wire = wire
        self._per_connection = per_connection
        self._epoll = select.epoll()
        self._connections: dict[int, _Connection] = {}
        self._newest: _Connection | None = None
        self.errors: Counter[str] = Counter()
        self.begun = 0
        self.tokens = 0

    def open(self, number: int, per_s: float) -> None:
        """Open `number` streams, spread evenly over time."""
        began, opened = time.monotonic(), 0
        while opened < number:
            due = min(number, int((time.monotonic() - began) * per_s) + 1)
            for _ in range(due - opened):
                self._connection_with_room().open_stream()
            opened = due
            self.read(TICK_S)

    def _connection_with_room(self) -> _Connection:
        newest = self._newest
        if newest is None or newest.opened == self._per_connection or newest.sock.fileno() < 0:
            self._newest = newest = _Connection(self._address, self._wire())
            self._connections[newest.sock.fileno()] = newest
            self._epoll.register(newest.sock, select.EPOLLIN)
        return newest

    def wait_begun(self, seconds_max: float) -> None:
        """Wait until each stream has received its first token or has failed."""
        give_up_at = time.monotonic() + seconds_max
        while self.begun < len(self._streams()) and time.monotonic() < give_up_at:
            self.read(TICK_S)
        self.errors["no token"] += len(self._streams()) - self.begun
        self.errors += Counter()  # Drops the zeros.

    def _streams(self) -> list[_Stream]:
        return [stream for connection in self._connections.values() for stream in connection.streams.values()]

    def read(self, seconds: float) -> None:
        """Read whatever arrives within this time."""
        over_at = time.monotonic() + seconds
        while (left_s := over_at - time.monotonic()) > 0:
            for fd, _ in self._epoll.poll(left_s):
                connection = self._connections[fd]
                try:
                    data = connection.sock.recv(RECEIVE_BYTES)
                except OSError as error:
                    self._lose_connection(connection, str(error))
                else:
                    self._on_data(connection, data)

    def _on_data(self, connection: _Connection, data: bytes) -> None:
        if not data:
            self._lose_connection(connection, "hung up")
            return
        now = time.monotonic()
        for number, what in connection.wire.feed(data):
            if isinstance(what, str):
                self._lose(connection, number, what)
                continue
            stream = connection.streams[number]
            self.begun += stream.last_at is None
            self.tokens += what
            stream.record_tokens(what, now)
        if not connection.streams and connection.opened == self._per_connection:
            self._close(connection)
        elif reply := connection.wire.reply:
            connection.send(reply)

    def _lose_connection(self, connection: _Connection, why: str) -> None:
        for number in list(connection.streams):
            self._lose(connection, number, why)
        self._close(connection)

    def _close(self, connection: _Connection) -> None:
        del self._connections[connection.sock.fileno()]
        self._epoll.unregister(connection.sock)
        connection.sock.close()

    def _lose(self, connection: _Connection, number: int, why: str) -> None:
        stream = connection.streams.pop(number)
        self.begun -= stream.last_at is not None
        self.errors[why] += 1

    def reset(self) -> None:
        """Restart the count of tokens and the recording of gaps."""
        self.tokens = 0
        for stream in self._streams():
            stream.gaps_s = array("f")

    def gaps_s(self) -> list[list[float]]:
        """Return the gaps of each stream that is still open."""
        now = time.monotonic()
        return [stream.gaps_until(now) for stream in self._streams()]

    def __enter__(self) -> "HeldStreams":
        return self

    def __exit__(self, *_: object) -> None:
        self._epoll.close()
        for connection in self._connections.values():
            connection.sock.close()


def _status_in(trailers: bytes) -> str:
    """Return the number of a status. Its message may be another one for each rpc."""
    number = trailers.partition(_STATUS)[2]
    return f"grpc-status {number[1 : 1 + number[0]].decode()}" if number else "no status"


def _why_lost(data: bytes, *, has_head: bool) -> str | None:
    """Return why the stream cannot continue after these bytes; None if it can."""
    if not has_head and not data.startswith(OK):
        return data[:SHOWN_BYTES].partition(b"\r\n")[0].decode(errors="replace")
    return next((end.decode() for end in ENDS if end in data), None)
