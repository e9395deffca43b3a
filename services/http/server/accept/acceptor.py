"""Accepts connections at once, and sets them up a few at a time, health checks first.

In the kernel's accept queue, a health check would wait behind all clients of a storm; and clients that a full queue
turns away come back a second later. So the queue is emptied as fast as it fills. Until a connection is set up it costs
a socket and nothing else. In a storm, its first bytes say whether it is a health check, so it is set up only after they
have come. While nobody waits, it is set up at once: its request finds everything prepared.

| descriptors | a new connection |
| --- | --- |
| some are left besides the reserve | is set up |
| only the reserve is left | is refused with a response, unless it is a health check: that is answered, and closed |
| only the reserve is left, and clients speak TLS | is refused with an alert: see secure.py |
| none is left | waits in the kernel's queue until a connection has ended, or PAUSE_S |
"""

import asyncio
import errno
import os
import socket
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import structlog

from services.http.server.accept.probes import first_bytes, is_probe
from services.http.server.accept.refused import Answers
from services.http.server.accept.refuser import Refuser
from services.runtime.descriptors.limit import is_reserved, limit, reserve
from services.runtime.log_throttle import LogThrottle

log = structlog.get_logger()

ACCEPTS_MAX = 256
"""Connections accepted in one iteration of the event loop: a few milliseconds."""
REFUSALS_A_TURN_MAX = 32
"""Connections refused in one iteration of the event loop: a few milliseconds."""
SETUPS_MAX = 16
"""Connections set up at a time. Health checks are not counted."""
LATE_PROBES_MAX = 16
"""Health checks that take descriptors of the reserve at a time, but at most an eighth of it. While there are as many,
nothing is accepted; those that are just being refused may add half of REFUSED_MAX."""
WAITING_MAX = 16_384
"""Connections that have sent something and wait to be set up. Beyond that, clients wait in the kernel's queue."""
FIRST_BYTES_S = 1.0
"""How long the first bytes of a connection are waited for before it is set up without them."""
PARTING_BYTES_MAX = 64 * 1024
"""What is read of a client that is refused at once."""
PAUSE_S = 0.5
"""How long nothing is accepted after file descriptors or memory have run out, or WAITING_MAX has been reached, unless
a connection ends before."""
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Server(Answers, Protocol):
    """What an acceptor accepts for."""

    @property
    def takes_reserve(self) -> bool:
        """Whether no connection is refused for want of descriptors."""
        ...

    @property
    def no_room_at_once(self) -> bytes | None:
        """What clients without room are sent before they have sent their request; None: it is waited for."""
        ...

    def make_connection(self, only_request: bytes | None = None) -> asyncio.BaseProtocol:
        """The protocol of a new connection. `only_request`: a whole request, after whose answer it closes."""
        ...

    def on_paused(self) -> None:
        """Nothing is accepted for a while."""
        ...


class Acceptor:
    """Accepts connections until `close`."""

    def __init__(self, listeners: Sequence[socket.socket], server: Server, group: asyncio.TaskGroup) -> None:
        """`listeners`: non-blocking and listening; `close` closes them. `group`: of the tasks for set-ups."""
        self._listeners = listeners
        self._server = server
        self._group = group
        self._probes: deque[socket.socket] = deque()
        self._others: deque[socket.socket] = deque()
        self._silent: set[socket.socket] = set()  # Connections that have sent nothing yet.
        self._setups: dict[asyncio.Task[None], socket.socket] = {}
        self._late_probes: list[socket.socket] = []  # Some of them may be closed.
        self._late_probes_max = max(2, min(LATE_PROBES_MAX, reserve(limit()) // 8))
        self._refuser = Refuser(server, on_probe=self._on_late_probe, on_room=self.on_room)
        self._paused: set[socket.socket] = set()  # Listeners.
        self._throttle = LogThrottle()
        self._refused_count = 0  # Since the last log line.
        for listener in listeners:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def close(self) -> None:
        """Stop accepting, and close connections that are not set up.

        A set-up that is running completes: uvloop, if interrupted there, never calls `connection_lost`.
        """
        loop = asyncio.get_running_loop()
        for sock in (*self._listeners, *self._silent):
            loop.remove_reader(sock)
        for sock in (*self._listeners, *self._probes, *self._others, *self._silent):
            sock.close()
        self._refuser.close()
        for closed in (self._probes, self._others, self._silent, self._paused):
            closed.clear()  # For set-ups that complete later, and for timers that still run.

    def on_room(self) -> None:
        """A connection has ended: accept again."""
        if self._paused:
            asyncio.get_running_loop().call_soon(self._resume)

    def _accept(self, listener: socket.socket) -> None:
        refusals = 0
        for _ in range(ACCEPTS_MAX):
            if len(self._others) >= WAITING_MAX:
                self._pause(listener, f"{WAITING_MAX} connections wait to be set up")
                break
            if self._refuser.is_full or self._is_full_of_probes:
                self._wait_for_room(listener)
                break
            try:
                sock, _address = listener.accept()
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    continue  # The client has disconnected. Source: accept(2), "Error handling".
                self._pause(listener, os.strerror(error.errno))
                break
            if self._has_room(sock):
                self._take(sock)
            else:
                self._refuse(sock)
                refusals += 1
            if refusals == REFUSALS_A_TURN_MAX:
                break

    @property
    def _is_full_of_probes(self) -> bool:
        self._late_probes = [sock for sock in self._late_probes if sock.fileno() >= 0]
        return len(self._late_probes) >= self._late_probes_max

    def _has_room(self, sock: socket.socket) -> bool:
        """Whether a new connection may stay. Otherwise it takes a descriptor of the reserve."""
        return self._server.takes_reserve or not is_reserved(sock.fileno())

    def _take(self, sock: socket.socket) -> None:
        if not self._others and len(self._setups) < SETUPS_MAX:
            self._start_setup(sock)
        elif (first := first_bytes(sock)) is None:
            self._silent.add(sock)
            loop = asyncio.get_running_loop()
            loop.add_reader(sock, self._on_first_bytes, sock)
            loop.call_later(FIRST_BYTES_S, self._on_silence, sock)
        else:
            self._enqueue(sock, first)

    def _refuse(self, sock: socket.socket) -> None:
        self._refused_count += 1
        if self._throttle.should_log():
            log.warning(
                "no room for more clients",
                why="the connections that the limit of open files allows are in use",
                limit=limit(),
                refused=self._refused_count,
            )
            self._refused_count = 0
        if (reply := self._server.no_room_at_once) is None:
            self._refuser.refuse(sock)
        else:
            _part(sock, reply)

    def _on_first_bytes(self, sock: socket.socket) -> None:
        if (first := first_bytes(sock)) is not None:
            asyncio.get_running_loop().remove_reader(sock)
            self._silent.discard(sock)
            self._enqueue(sock, first)

    def _on_silence(self, sock: socket.socket) -> None:
        """Set up a silent connection after FIRST_BYTES_S: once set up, the bounds of idle connections apply to it."""
        if sock in self._silent:
            asyncio.get_running_loop().remove_reader(sock)
            self._silent.remove(sock)
            self._enqueue(sock, b"")

    def _enqueue(self, sock: socket.socket, first: bytes) -> None:
        (self._probes if is_probe(first) else self._others).append(sock)
        self._start_setups()

    def _on_late_probe(self, sock: socket.socket, request: bytes) -> None:
        """A connection without room turned out to be a health check. It takes from the reserve, for one answer.

        Its request has come whole: one that does not continue would keep its descriptor for `body_read_s_max`.
        """
        self._late_probes.append(sock)
        self._start_setup(sock, request)

    def _start_setups(self) -> None:
        while self._probes:
            self._start_setup(self._probes.popleft())
        while self._others and len(self._setups) < SETUPS_MAX:
            self._start_setup(self._others.popleft())

    def _start_setup(self, sock: socket.socket, only_request: bytes | None = None) -> None:
        self._setups[task := self._group.create_task(self._set_up(sock, only_request))] = sock
        task.add_done_callback(self._on_set_up)

    def _on_set_up(self, task: "asyncio.Task[None]") -> None:
        sock = self._setups.pop(task)
        if task.cancelled():
            sock.close()
        else:
            self._start_setups()

    def _pause(self, listener: socket.socket, why: str) -> None:
        if self._throttle.should_log():
            log.warning("no room for more clients", why=why, again_in_s=PAUSE_S)
        self._server.on_paused()
        self._wait_for_room(listener)

    def _wait_for_room(self, listener: socket.socket) -> None:
        """Accept nothing until a connection ends, at most for PAUSE_S."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener)
        self._paused.add(listener)
        loop.call_later(PAUSE_S, self._resume)

    def _resume(self) -> None:
        paused, self._paused = self._paused, set()
        for listener in paused:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    async def _set_up(self, sock: socket.socket, only_request: bytes | None) -> None:
        """Hand the socket to a connection, which owns it from then on."""
        sock.setblocking(False)

        def make() -> asyncio.BaseProtocol:
            return self._server.make_connection(only_request)

        try:
            await asyncio.get_running_loop().connect_accepted_socket(make, sock)
        except OSError as error:  # This client's problem alone: it must not end the server.
            log.debug("client lost before its connection was set up", why=str(error))
            sock.close()


def _part(sock: socket.socket, reply: bytes) -> None:
    """Send the reply and close. What has come is read before: otherwise closing would reset the connection."""
    with sock, suppress(OSError):
        sock.setblocking(False)
        sock.send(reply)
        sock.shutdown(socket.SHUT_WR)
        sock.recv(PARTING_BYTES_MAX)
