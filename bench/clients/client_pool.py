"""Many clients in one thread, with raw sockets and epoll, so that they cost little beside what they measure."""

import select
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.clients.wires import ANSWERED, REFUSED, Wire

RECEIVE_BYTES = 65_536
REPLY_S_MAX = 120.0
"""A request without a reply by then counts as lost."""


@dataclass(slots=True)
class Replies:
    """The replies that all clients received. `seconds`: from the connect or the request to the reply's last byte."""

    counts: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, list[float]] = field(default_factory=lambda: {ANSWERED: [], REFUSED: []})
    total_s: float = 0.0

    def add(self, outcome: str, seconds: float) -> None:
        self.counts[outcome] += 1
        self.seconds.setdefault(outcome, []).append(seconds)

    @property
    def is_honest(self) -> bool:
        """Whether every reply is a complete answer or a proper refusal."""
        return self.counts.keys() <= {ANSWERED, REFUSED}


class _Client:
    """One connection, with the protocol that it speaks."""

    __slots__ = ("is_connected", "sock", "unsent", "waits_for", "wire")

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.waits_for = 0
        self.is_connected = False
        self.sock = socket.socket()
        self.sock.setblocking(False)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.unsent = b""


class ClientPool:
    """Clients of one address. As a context manager it closes all connections on exit."""

    def __init__(self, address: str, number: int, wire: Callable[[], Wire]) -> None:
        host, _, port = address.rpartition(":")
        self._address = host, int(port)
        self._epoll = select.epoll()
        self._clients = {client.sock.fileno(): client for client in (_Client(wire()) for _ in range(number))}
        self._pending = 0
        self._replies = Replies()

    def connect(self) -> None:
        """Open all connections before the first request."""
        for client in self._clients.values():
            client.sock.setblocking(True)
            client.sock.connect(self._address)
            client.sock.setblocking(False)
            client.is_connected = True
            self._epoll.register(client.sock, select.EPOLLIN)

    def send_all(self, each: int = 1, *, for_s: float = 0.0) -> Replies:
        """Send `each` requests on every connection at once, and read all replies.

        A connection whose request is answered sends another one until `for_s` have passed. Connections that are not
        open yet are opened first, all at once.
        """
        began = time.monotonic()
        self._replies = Replies()
        self._pending = each * len(self._clients)
        for fd, client in self._clients.items():
            now = time.monotonic()
            client.unsent = b"".join(client.wire.next_request(now) for _ in range(each))
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
        self._replies.counts += Counter()  # Drops the zeros.
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
                client.unsent += client.wire.next_request(now)
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

    def __enter__(self) -> "ClientPool":
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients.values():
            client.sock.close()
        self._epoll.close()
