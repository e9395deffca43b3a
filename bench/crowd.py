"""A crowd of clients in one thread: raw sockets and epoll, so that they cost little beside what they measure."""

import select
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from services.stubs import inference_pb2

RECEIVE_BYTES = 65_536
REPLY_S_MAX = 120.0
"""Who has no reply by then never gets one."""
SHOWN_BYTES = 300

ANSWERED, REFUSED = "answered", "refused"


@dataclass(slots=True)
class Replies:
    """What the crowd got. seconds: of each reply, from the connect or the request to its last byte."""

    counts: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, list[float]] = field(default_factory=lambda: {ANSWERED: [], REFUSED: []})
    total_s: float = 0.0

    def add(self, outcome: str, seconds: float) -> None:
        self.counts[outcome] += 1
        self.seconds.setdefault(outcome, []).append(seconds)

    @property
    def is_honest(self) -> bool:
        """Nothing but whole answers and refusals."""
        return self.counts.keys() <= {ANSWERED, REFUSED}


class Wire(Protocol):
    """One connection's bytes: `ask` gives those of one more request, `feed` the ends that are in what has come."""

    def ask(self, now: float) -> bytes: ...

    def feed(self, data: bytes) -> Iterator[tuple[str, float]]:
        """(outcome, when it was asked) of each request that has ended; `answer` in bytes that call for one."""
        ...

    @property
    def reply(self) -> bytes:
        """What the wire itself has to say, taken once."""
        ...


class HttpWire:
    """One HTTP/1.1 request at a time, streamed or not."""

    reply = b""

    def __init__(self, message: bytes) -> None:
        self._message = message
        self._got = b""
        self._asked_at = 0.0

    def ask(self, now: float) -> bytes:
        self._asked_at = now
        return self._message

    def feed(self, data: bytes) -> Iterator[tuple[str, float]]:
        self._got += data
        head, found, body = self._got.partition(b"\r\n\r\n")
        if not found or not _is_whole(head, body):
            return
        self._got = b""
        yield _http_outcome(head, body), self._asked_at


def _is_whole(head: bytes, body: bytes) -> bool:
    _, is_sized, length = head.lower().partition(b"content-length: ")
    return len(body) >= int(length.split(b"\r\n")[0]) if is_sized else body.endswith(b"0\r\n\r\n")


def _http_outcome(head: bytes, body: bytes) -> str:
    """A refusal has its status, its reason and a time to come back; an answer its end."""
    if head.startswith(b"HTTP/1.1 200") and (b"[DONE]" in body or b'"finish_reason":"length"' in body):
        return ANSWERED
    has_reason = b'"OVERLOADED"' in body or b'"WORKER_AT_CAPACITY"' in body
    if head.startswith(b"HTTP/1.1 503") and has_reason and b"Retry-After: " in head:
        return REFUSED
    return f"{head[:SHOWN_BYTES]!r} {body[:SHOWN_BYTES]!r}"


def http_message(path: str, body: bytes) -> bytes:
    """A POST as it goes over the wire."""
    return b"POST %b HTTP/1.1\r\nHost: storm\r\nContent-Length: %d\r\n\r\n%b" % (path.encode(), len(body), body)


_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS = 0x1, 0x1, 0x4
_WINDOW_BYTES = 2**31 - 1
_HEADER_TABLE_SIZE, _INITIAL_WINDOW_SIZE = 1, 4
_MARKER = inference_pb2.GenerateResponse(complete_final=True).SerializeToString()


def _frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    """Source: RFC 9113, 4.1."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream_id) + payload


def _literal(name: bytes, value: bytes) -> bytes:
    """A header field without compression. Source: RFC 7541, 6.2.2."""
    return bytes([0, len(name)]) + name + bytes([len(value)]) + value


class GrpcWire:
    """Any number of gRPC calls at a time. HTTP/2 without a header table, so that a status can be read as it stands."""

    def __init__(self, path: str, message: bytes) -> None:
        fields = ((b":method", b"POST"), (b":scheme", b"http"), (b":path", path.encode()), (b":authority", b"storm"))
        more = ((b"content-type", b"application/grpc"), (b"te", b"trailers"))
        self._headers = b"".join(_literal(*one) for one in (*fields, *more))
        self._data = struct.pack(">BI", 0, len(message)) + message
        settings = struct.pack(">HIHI", _HEADER_TABLE_SIZE, 0, _INITIAL_WINDOW_SIZE, _WINDOW_BYTES)
        window = struct.pack(">I", _WINDOW_BYTES - 65_535)
        greeting = _frame(_SETTINGS, 0, 0, settings) + _frame(_WINDOW_UPDATE, 0, 0, window)
        self._reply = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + greeting
        self._next_id = 1
        self._asked_at: dict[int, float] = {}
        self._got: dict[int, bytes] = {}
        self._rest = b""

    @property
    def reply(self) -> bytes:
        reply, self._reply = self._reply, b""
        return reply

    def ask(self, now: float) -> bytes:
        stream_id, self._next_id = self._next_id, self._next_id + 2
        self._asked_at[stream_id], self._got[stream_id] = now, b""
        headers = _frame(_HEADERS, _END_HEADERS, stream_id, self._headers)
        return self.reply + headers + _frame(_DATA, _END_STREAM, stream_id, self._data)

    def feed(self, data: bytes) -> Iterator[tuple[str, float]]:
        self._rest += data
        while len(self._rest) >= 9:
            length = int.from_bytes(self._rest[:3], "big")
            if len(self._rest) < 9 + length:
                return
            kind, flags, stream_id = struct.unpack(">BBI", self._rest[3:9])
            payload, self._rest = self._rest[9 : 9 + length], self._rest[9 + length :]
            if self._take(kind, flags, stream_id, payload):
                yield _grpc_outcome(self._got.pop(stream_id), payload), self._asked_at.pop(stream_id)

    def _take(self, kind: int, flags: int, stream_id: int, payload: bytes) -> bool:
        """True when the call has ended."""
        assert kind != _GOAWAY, payload
        if kind in (_SETTINGS, _PING) and not flags & _ACK:
            self._reply += _frame(kind, _ACK, 0, payload if kind == _PING else b"")
        if kind == _DATA and payload:
            self._got[stream_id] = payload
        ends = kind == _RST_STREAM or (kind == _HEADERS and bool(flags & _END_STREAM))
        return ends and stream_id in self._asked_at  # A server may reset a stream that it has ended.


def _grpc_outcome(last: bytes, trailers: bytes) -> str:
    if b"\x0bgrpc-status\x010" in trailers and last.endswith(_MARKER):
        return ANSWERED
    has_details = b"\x17grpc-status-details-bin" in trailers
    return REFUSED if b"\x0bgrpc-status\x018" in trailers and has_details else f"{last!r} {trailers[:SHOWN_BYTES]!r}"


class _Client:
    """One connection and its wire."""

    __slots__ = ("is_connected", "sock", "unsent", "waits_for", "wire")

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.waits_for = 0
        self.is_connected = False
        self.sock = socket.socket()
        self.sock.setblocking(False)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.unsent = b""


class Crowd:
    """Clients of one address; a context: leaving it hangs up."""

    def __init__(self, address: str, number: int, wire: Callable[[], Wire]) -> None:
        host, _, port = address.rpartition(":")
        self._address = host, int(port)
        self._epoll = select.epoll()
        self._clients = {client.sock.fileno(): client for client in (_Client(wire()) for _ in range(number))}
        self._pending = 0
        self._replies = Replies()

    def connect(self) -> None:
        """Have all connections before anything is asked."""
        for client in self._clients.values():
            client.sock.setblocking(True)
            client.sock.connect(self._address)
            client.sock.setblocking(False)
            client.is_connected = True
            self._epoll.register(client.sock, select.EPOLLIN)

    def ask(self, each: int = 1, *, for_s: float = 0.0) -> Replies:
        """`each` requests on every connection at once; who has a reply asks again until `for_s` are over.

        Connections that are not there yet are made first, all at once.
        """
        began = time.monotonic()
        self._replies = Replies()
        self._pending = each * len(self._clients)
        for fd, client in self._clients.items():
            now = time.monotonic()
            client.unsent = b"".join(client.wire.ask(now) for _ in range(each))
            client.waits_for = each
            if client.is_connected:
                self._send(client)
            else:
                client.sock.connect_ex(self._address)
                client.is_connected = True
                self._epoll.register(fd, select.EPOLLIN | select.EPOLLOUT)
        while self._pending and time.monotonic() - began < REPLY_S_MAX:
            for fd, events in self._epoll.poll(1.0):
                self._on_event(self._clients[fd], events, again_until=began + for_s)
        self._replies.counts["no reply"] += self._pending
        self._replies.counts += Counter()  # Without zeros.
        self._replies.total_s = time.monotonic() - began
        return self._replies

    def _on_event(self, client: _Client, events: int, again_until: float) -> None:
        if events & select.EPOLLOUT:
            self._send(client)
        if not events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
            return
        try:
            data = client.sock.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(client, str(error))
            return
        if not data:
            self._lose(client, "hung up")
            return
        now = time.monotonic()
        for outcome, asked_at in client.wire.feed(data):
            self._replies.add(outcome, now - asked_at)
            if now < again_until:
                client.unsent += client.wire.ask(now)
            else:
                client.waits_for -= 1
                self._pending -= 1
        client.unsent += client.wire.reply
        if client.unsent:
            self._send(client)

    def _send(self, client: _Client) -> None:
        try:
            sent = client.sock.send(client.unsent)
        except BlockingIOError:
            sent = 0
        client.unsent = client.unsent[sent:]
        self._epoll.modify(client.sock, select.EPOLLIN | (select.EPOLLOUT if client.unsent else 0))

    def _lose(self, client: _Client, why: str) -> None:
        self._replies.counts[f"lost: {why}"] += client.waits_for
        self._pending -= client.waits_for
        self._epoll.unregister(client.sock)

    def __enter__(self) -> "Crowd":
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients.values():
            client.sock.close()
        self._epoll.close()


def quantiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    """p50, p99 and the most."""
    ordered = sorted(seconds) or [0.0]
    shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: round(ordered[min(int(q * len(ordered)), len(ordered) - 1)] * 1e3, 1) for name, q in shares.items()}
