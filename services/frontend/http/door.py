"""Where HTTP clients come in: whoever knocks is let in at once, and gets a seat in turn.

In the kernel's queue a probe would stand behind all clients of a storm, and a queue that is full turns clients away,
who come again a second later. So the queue is emptied as fast as it fills, probes are seated first, and the rest a few
at a time; until then a client costs its socket and no more.
"""

import asyncio
import errno
import os
import socket
from collections import deque

import structlog
from aiohttp import web

from services.fair_loop import add_to_crowd

log = structlog.get_logger()

ACCEPTS_MAX = 512
"""A turn of the loop: some milliseconds."""
SEATS_MAX = 16
"""At a time, of those who are no probes, and as many of those who are silent."""
PROBES = (b"GET /live ", b"GET /health ")
STANDING_MAX = 16_384
"""Who have no seat yet: beyond that clients wait outside."""
FULL_S = 0.5
"""How long nobody is let in when there are no more files, no memory for sockets, or too many without a seat."""
FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Door(web.BaseSite):
    """A site of an aiohttp runner. `start` and `stop` are called by the same task."""

    def __init__(self, runner: web.AppRunner, host: str, port: int, *, backlog: int) -> None:
        super().__init__(runner, backlog=backlog)
        self._host = host
        self._port = port
        self._listeners: list[socket.socket] = []
        self._probes: deque[socket.socket] = deque()
        self._others: deque[socket.socket] = deque()
        self._silent: deque[socket.socket] = deque()  # They have said nothing yet that would tell which they are.
        self._seating: asyncio.Task[None] | None = None
        self._group = asyncio.TaskGroup()

    @property
    def name(self) -> str:
        return f"http://{self._host}:{self._port}"

    async def start(self) -> None:
        """Listen. Raises OSError when the address can't be had."""
        await super().start()
        factory = self._runner.server
        assert factory is not None, "the runner is set up"
        loop = asyncio.get_running_loop()
        self._server = bound = await loop.create_server(factory, self._host, self._port, start_serving=False)
        self._listeners = [one.dup() for one in bound.sockets]
        for listener in self._listeners:
            listener.setblocking(False)
            listener.listen(self._backlog)
            loop.add_reader(listener, self._let_in, listener)
        await self._group.__aenter__()

    async def stop(self) -> None:
        await super().stop()
        for listener in self._listeners:
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()
        if self._listeners:
            if self._seating is not None:
                self._seating.cancel()
            await self._group.__aexit__(None, None, None)
        for sock in (*self._probes, *self._others, *self._silent):
            sock.close()

    def _let_in(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTS_MAX):
            if len(self._others) + len(self._silent) >= STANDING_MAX:
                self._close_for_a_while(listener, f"{STANDING_MAX} have no seat yet")
                break
            try:
                sock, _address = listener.accept()
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno not in FULL:
                    continue  # One that was gone before it came in. Source: accept(2), "Error handling".
                self._close_for_a_while(listener, os.strerror(error.errno))
                break
            sock.setblocking(False)
            words = _first_words(sock)
            (self._silent if words is None else self._queue_of(words)).append(sock)
        if self._seating is None or self._seating.done():
            self._seating = self._group.create_task(self._seat_all())

    def _close_for_a_while(self, listener: socket.socket, why: str) -> None:
        log.warning("no room for more clients", why=why, again_in_s=FULL_S)
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener)
        loop.call_later(FULL_S, self._open_again, listener)

    def _open_again(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:  # It may have been closed meanwhile.
            asyncio.get_running_loop().add_reader(listener, self._let_in, listener)

    async def _seat_all(self) -> None:
        while self._probes or self._others or self._silent:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(SEATS_MAX, len(self._silent))):
                    sock = self._silent.popleft()
                    if words := _first_words(sock):
                        self._queue_of(words).append(sock)
                    else:  # It may be a probe: what it says is then heard without standing behind all who came.
                        self._seat_in_crowd(sock, group)
                while self._probes:
                    group.create_task(self._seat(self._probes.popleft()))
                for _ in range(min(SEATS_MAX, len(self._others))):
                    self._seat_in_crowd(self._others.popleft(), group)

    def _seat_in_crowd(self, sock: socket.socket, group: asyncio.TaskGroup) -> None:
        add_to_crowd(sock)
        group.create_task(self._seat(sock))

    def _queue_of(self, words: bytes) -> deque[socket.socket]:
        return self._probes if words.startswith(PROBES) else self._others

    async def _seat(self, sock: socket.socket) -> None:
        """From here on the connection is aiohttp's."""
        factory = self._runner.server
        assert factory is not None, "the site is stopped before its server"
        try:
            await asyncio.get_running_loop().connect_accepted_socket(factory, sock)
        except OSError as error:  # Its own misfortune, and nobody else's.
            log.debug("client lost at the door", why=str(error))
            sock.close()


def _first_words(sock: socket.socket) -> bytes | None:
    """What the client has said, which mostly comes with the connection; None: nothing yet."""
    try:
        return sock.recv(max(map(len, PROBES)), socket.MSG_PEEK)
    except BlockingIOError:
        return None
    except OSError:  # It is gone; aiohttp will notice.
        return b""
