"""Accepts connections at once, and sets them up a few at a time, health checks first.

In the kernel's accept queue, a health check would wait behind all clients of a storm; and clients that a full queue
turns away come back a second later. So the queue is emptied as fast as it fills. Until a connection is set up it costs
a socket and nothing else. Its first bytes say whether it is a health check, so it is set up only after they have come.
"""

import asyncio
import errno
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence

import structlog

from services.http.server.config import PROBE_PATHS

log = structlog.get_logger()

ACCEPTS_MAX = 256
"""Connections accepted in one iteration of the event loop: a few milliseconds."""
SETUPS_MAX = 16
"""Connections set up at a time. Health checks are not counted."""
WAITING_MAX = 16_384
"""Connections that have sent something and wait to be set up. Beyond that, clients wait in the kernel's queue."""
FIRST_BYTES_S = 1.0
"""How long the first bytes of a connection are waited for before it is set up without them."""
PAUSE_S = 0.5
"""How long nothing is accepted after file descriptors or memory have run out, or WAITING_MAX has been reached."""
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PROBES = tuple(f"GET {path} ".encode() for path in PROBE_PATHS)
_PROBE_BYTES = max(map(len, _PROBES))


class Acceptor:
    """Accepts connections until `close`."""

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        make_connection: Callable[[], asyncio.BaseProtocol],
        group: asyncio.TaskGroup,
    ) -> None:
        """`listeners`: non-blocking and listening; `close` closes them. `group`: of the tasks for set-ups."""
        self._listeners = listeners
        self._make_connection = make_connection
        self._group = group
        self._probes: deque[socket.socket] = deque()
        self._others: deque[socket.socket] = deque()
        self._silent: set[socket.socket] = set()  # Connections that have sent nothing yet.
        self._setups: dict[asyncio.Task[None], socket.socket] = {}
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
        for closed in (self._probes, self._others, self._silent):
            closed.clear()  # For set-ups that complete later, and for timers that still run.

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTS_MAX):
            if len(self._others) >= WAITING_MAX:
                self._pause(listener, f"{WAITING_MAX} connections wait to be set up")
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
            if (first := _first_bytes(sock)) is None:
                self._silent.add(sock)
                loop = asyncio.get_running_loop()
                loop.add_reader(sock, self._on_first_bytes, sock)
                loop.call_later(FIRST_BYTES_S, self._on_silence, sock)
            else:
                self._enqueue(sock, first)

    def _on_first_bytes(self, sock: socket.socket) -> None:
        if (first := _first_bytes(sock)) is not None:
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
        (self._probes if first.startswith(_PROBES) else self._others).append(sock)
        self._start_setups()

    def _start_setups(self) -> None:
        while self._probes:
            self._start_setup(self._probes.popleft())
        while self._others and len(self._setups) < SETUPS_MAX:
            self._start_setup(self._others.popleft())

    def _start_setup(self, sock: socket.socket) -> None:
        self._setups[task := self._group.create_task(self._set_up(sock))] = sock
        task.add_done_callback(self._on_set_up)

    def _on_set_up(self, task: "asyncio.Task[None]") -> None:
        sock = self._setups.pop(task)
        if task.cancelled():
            sock.close()
        else:
            self._start_setups()

    def _pause(self, listener: socket.socket, why: str) -> None:
        log.warning("no room for more clients", why=why, again_in_s=PAUSE_S)
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener)
        loop.call_later(PAUSE_S, self._resume, listener)

    def _resume(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:  # Unless closed meanwhile.
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    async def _set_up(self, sock: socket.socket) -> None:
        """Hand the socket to a connection, which owns it from then on."""
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self._make_connection, sock)
        except OSError as error:  # This client's problem alone: it must not end the server.
            log.debug("client lost before its connection was set up", why=str(error))
            sock.close()


def _first_bytes(sock: socket.socket) -> bytes | None:
    """The first bytes, which stay in the socket; None: none have come. They usually come with the connection."""
    try:
        return sock.recv(_PROBE_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    except OSError:  # The connection is broken; its protocol will notice.
        return b""
