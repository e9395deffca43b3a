"""Answers connections for which there is no room: each request gets a response that says so, and is closed.

It needs few descriptors for many connections, because a refused one stays only until its request has come and its
client has read the answer.
"""

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from services.http.h2.wire.frames import PREFACE
from services.http.server.accept.refused import Answers, H1Arrival, H2Arrival, arrival_of
from services.runtime.descriptors.limit import limit, reserve

REFUSED_MAX = 32
"""Connections that are refused at the same time, but at most half of the reserve of descriptors. Half of them may wait
for their request. For one more, the oldest that has its answer is closed."""
REFUSED_S_MAX = 0.5
"""How long a request may take to come before it is answered without, and how long its client may take to read."""
_READ_BYTES = 64 * 1024


@dataclass(slots=True)
class _Waiting:
    """A connection that waits for its request. `received`: its bytes so far. `arrival`: None until they say which."""

    received: bytearray = field(default_factory=bytearray)
    arrival: H1Arrival | H2Arrival | None = None


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
        self._waiting: dict[socket.socket, _Waiting] = {}
        self._answered: dict[socket.socket, None] = {}  # Oldest first.
        self._max = max(2, min(REFUSED_MAX, reserve(limit()) // 2))
        self._loop = asyncio.get_running_loop()

    @property
    def is_full(self) -> bool:
        """Whether no further connection can be refused at present."""
        return len(self._waiting) >= self._max // 2

    def refuse(self, sock: socket.socket) -> None:
        """Own the connection, and answer its request when it has come. Not while `is_full`."""
        sock.setblocking(False)
        if len(self._timers) >= self._max:
            self._end(next(iter(self._answered)))
        self._waiting[sock] = _Waiting()
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
        elif (waiting := self._waiting.get(sock)) is not None:
            self._add(sock, waiting, data)

    def _add(self, sock: socket.socket, waiting: _Waiting, data: bytes) -> None:
        waiting.received += data
        if waiting.arrival is None:
            data = bytes(waiting.received)
            waiting.arrival = arrival_of(data)
            if waiting.arrival is None:
                return
            self._send(sock, waiting.arrival.greeting)
            data = data.removeprefix(PREFACE)
        is_over = waiting.arrival.feed(data)
        if waiting.arrival.is_probe:
            received = bytes(waiting.received)
            self._forget(sock)
            self._on_probe(sock, received)
            self._on_room()
        elif is_over:
            self._answer(sock)

    def _answer(self, sock: socket.socket) -> None:
        """Send the response. What the client sends from now on is discarded: closing would lose the response."""
        arrival = self._waiting.pop(sock).arrival or H1Arrival()
        self._answered[sock] = None
        self._timers[sock].cancel()
        self._timers[sock] = self._loop.call_later(REFUSED_S_MAX, self._end, sock)
        self._send(sock, arrival.answer(self._answers))
        with suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
        self._on_room()

    def _send(self, sock: socket.socket, data: bytes) -> None:
        with suppress(OSError):  # The client has disconnected: the next read ends the connection.
            sock.send(data)  # It fits the empty buffer of the kernel.

    def _end(self, sock: socket.socket) -> None:
        self._forget(sock)
        sock.close()
        self._on_room()

    def _forget(self, sock: socket.socket) -> None:
        self._loop.remove_reader(sock)
        self._timers.pop(sock).cancel()
        self._answered.pop(sock, None)
        if (waiting := self._waiting.pop(sock, None)) is not None and waiting.arrival is not None:
            waiting.arrival.close()
