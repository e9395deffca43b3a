"""Answers connections for which there is no room: each request gets a response that says so, and is closed.

It needs few descriptors for many connections, because a refused one stays only until its request has come and its
client has read the answer.
"""

import asyncio
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

from services.http.server.parser import RequestParser
from services.http.server.probes import first_bytes, is_probe
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


class Refuser:
    """Refuses connections until `close`. A health check among them is passed on instead."""

    def __init__(
        self, answers: Answers, *, on_probe: Callable[[socket.socket], None], on_room: Callable[[], None]
    ) -> None:
        """`on_room`: called when `is_full` may have become false."""
        self._answers = answers
        self._on_probe = on_probe
        self._on_room = on_room
        self._timers: dict[socket.socket, asyncio.TimerHandle] = {}
        self._parsers: dict[socket.socket, RequestParser] = {}  # Of connections that wait for their request.
        self._answered: dict[socket.socket, None] = {}  # Oldest first.
        self._max = max(2, min(REFUSED_MAX, reserve(limit()) // 2))
        self._loop = asyncio.get_running_loop()

    @property
    def is_full(self) -> bool:
        """Whether no further connection can be refused at present."""
        return len(self._parsers) >= self._max // 2

    def refuse(self, sock: socket.socket) -> None:
        """Own the connection, and answer its request when it has come. Not while `is_full`."""
        sock.setblocking(False)
        if len(self._timers) >= self._max:
            self._end(next(iter(self._answered)))
        self._parsers[sock] = RequestParser(REFUSED_BODY_BYTES_MAX)
        self._timers[sock] = self._loop.call_later(REFUSED_S_MAX, self._answer, sock)
        self._loop.add_reader(sock, self._read, sock)
        self._read(sock)

    def close(self) -> None:
        """Close all refused connections."""
        for sock in list(self._timers):
            self._end(sock)

    def _read(self, sock: socket.socket) -> None:
        parser = self._parsers.get(sock)
        if parser is not None and not parser.is_midway:
            first = first_bytes(sock)
            if first is None:
                return
            if is_probe(first):
                self._forget(sock)
                self._on_probe(sock)
                return
        try:
            data = sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end(sock)
        elif parser is not None and (not parser.feed(data) or parser.requests or parser.wants_continue):
            self._answer(sock)

    def _answer(self, sock: socket.socket) -> None:
        """Send the response. What the client sends from now on is discarded: closing would lose the response."""
        parser = self._parsers.pop(sock)
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
        if (parser := self._parsers.pop(sock, None)) is not None:
            parser.close()
