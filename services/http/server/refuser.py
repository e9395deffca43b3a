"""Answers connections for which there is no room: each request gets a response that says so, and is closed.

It needs few descriptors for many connections, because a refused one stays only until its request has come and its
client has read the answer.
"""

import asyncio
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from services.http.h1.parser import RequestParser
from services.http.server.config import PROBE_PATHS
from services.http.server.messages import HttpRequest
from services.runtime.descriptors.limit import limit, reserve

REFUSED_MAX = 32
"""Connections that are refused at the same time, but at most half of the reserve of descriptors. Half of them may wait
for their request. For one more, the oldest that has its answer is closed."""
REFUSED_S_MAX = 0.5
"""How long a request may take to come before it is answered without, and how long its client may take to read."""
REFUSED_BODY_BYTES_MAX = 64 * 1024
"""A longer body is not waited for. Clients that are still sending may miss the answer."""
_READ_BYTES = 64 * 1024


class Answers(Protocol):
    """Makes the answers, and counts them."""

    def no_room(self, path: str, headers: Mapping[str, str]) -> bytes:
        """The response to a request. `headers`: those that have come, by lower-case names. `path`: "" if unknown."""
        ...


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A request that arrives. received: its bytes so far; the bounds of the parser bound them."""

    parser: RequestParser
    received: bytearray = field(default_factory=bytearray)


class Refuser:
    """Refuses connections until `close`. A health check among them is passed on instead, once it has come whole."""

    def __init__(
        self, answers: Answers, *, on_probe: Callable[[socket.socket, bytes], None], on_room: Callable[[], None]
    ) -> None:
        """`on_probe`: called with a health check and its bytes. `on_room`: called when `is_full` may be false again."""
        self._answers = answers
        self._on_probe = on_probe
        self._on_room = on_room
        self._timers: dict[socket.socket, asyncio.TimerHandle] = {}
        self._arrivals: dict[socket.socket, _Arrival] = {}  # Of connections that wait for their request.
        self._answered: dict[socket.socket, None] = {}  # Oldest first.
        self._max = max(2, min(REFUSED_MAX, reserve(limit()) // 2))
        self._loop = asyncio.get_running_loop()

    @property
    def is_full(self) -> bool:
        """Whether no further connection can be refused at present."""
        return len(self._arrivals) >= self._max // 2

    def refuse(self, sock: socket.socket) -> None:
        """Own the connection, and answer its request when it has come. Not while `is_full`."""
        sock.setblocking(False)
        if len(self._timers) >= self._max:
            self._end(next(iter(self._answered)))
        self._arrivals[sock] = _Arrival(RequestParser(REFUSED_BODY_BYTES_MAX))
        self._timers[sock] = self._loop.call_later(REFUSED_S_MAX, self._answer, sock)
        self._loop.add_reader(sock, self._read, sock)
        self._read(sock)

    def close(self) -> None:
        """Close all refused connections."""
        for sock in list(self._timers):
            self._end(sock)

    def _read(self, sock: socket.socket) -> None:
        try:
            data = sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end(sock)
        elif (arrival := self._arrivals.get(sock)) is not None:
            self._add(sock, arrival, data)

    def _add(self, sock: socket.socket, arrival: _Arrival, data: bytes) -> None:
        arrival.received.extend(data)
        parser = arrival.parser
        is_over = not parser.feed(data) or parser.wants_continue
        if parser.requests and _is_probe(parser.requests[0]):
            self._forget(sock)
            self._on_probe(sock, bytes(arrival.received))
            self._on_room()
        elif is_over or parser.requests:
            self._answer(sock)

    def _answer(self, sock: socket.socket) -> None:
        """Send the response. What the client sends from now on is discarded: closing would lose the response."""
        parser = self._arrivals.pop(sock).parser
        request = parser.requests[0] if parser.requests else None
        path, headers = ("", parser.headers) if request is None else (request.path, request.headers)
        parser.close()
        self._answered[sock] = None
        self._timers[sock].cancel()
        self._timers[sock] = self._loop.call_later(REFUSED_S_MAX, self._end, sock)
        with suppress(OSError):  # The client has disconnected: the next read ends the connection.
            sock.send(self._answers.no_room(path, headers))  # It fits the empty buffer of the kernel.
            sock.shutdown(socket.SHUT_WR)
        self._on_room()

    def _end(self, sock: socket.socket) -> None:
        self._forget(sock)
        sock.close()
        self._on_room()

    def _forget(self, sock: socket.socket) -> None:
        self._loop.remove_reader(sock)
        self._timers.pop(sock).cancel()
        self._answered.pop(sock, None)
        if (arrival := self._arrivals.pop(sock, None)) is not None:
            arrival.parser.close()


def _is_probe(request: HttpRequest) -> bool:
    return request.method == "GET" and request.path in PROBE_PATHS
