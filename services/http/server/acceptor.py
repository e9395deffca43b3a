"""Where HTTP clients come in: whoever knocks is let in at once, and gets a seat in turn.

In the kernel's queue a probe would stand behind all clients of a storm, and a queue that is full turns clients away,
who come again a second later. So the queue is emptied as fast as it fills, probes are seated first, and the rest a few
at a time; until then a client costs its socket and no more. One that has said nothing yet may be either, so its first
words are waited for, and heard at once.
"""

import asyncio
import errno
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence

import structlog

log = structlog.get_logger()

ACCEPTS_MAX = 256
"""A turn of the loop: some milliseconds."""
SEATS_MAX = 16
"""At a time, of those who are no probes."""
PROBES = (b"GET /live ", b"GET /health ")
_WORDS_BYTES = max(map(len, PROBES))
STANDING_MAX = 16_384
"""Who have asked for something and have no seat yet: beyond that clients wait outside."""
SILENT_S = 1.0
"""How long the first words of a client are waited for at the door."""
FULL_S = 0.5
"""How long nobody is let in when there are no more files, no memory for sockets, or too many without a seat."""
FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Acceptor:
    """It is open until `close`."""

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        make_connection: Callable[[], asyncio.BaseProtocol],
        group: asyncio.TaskGroup,
    ) -> None:
        """listeners: non-blocking, and listening; they are closed with it. group: of the tasks that seat clients."""
        self._listeners = listeners
        self._make_connection = make_connection
        self._group = group
        self._probes: deque[socket.socket] = deque()
        self._others: deque[socket.socket] = deque()
        self._silent: set[socket.socket] = set()  # They have said nothing yet that would tell which they are.
        self._seating: dict[asyncio.Task[None], socket.socket] = {}
        for listener in listeners:
            asyncio.get_running_loop().add_reader(listener, self._let_in, listener)

    def close(self) -> None:
        """Let nobody in any more, and send those away who have no seat.

        Who is just being seated gets the seat: uvloop, stopped in that, does not tell a connection that it is lost.
        """
        loop = asyncio.get_running_loop()
        for sock in (*self._listeners, *self._silent):
            loop.remove_reader(sock)
        for sock in (*self._listeners, *self._probes, *self._others, *self._silent):
            sock.close()
        for closed in (self._probes, self._others, self._silent):
            closed.clear()  # A task that ends now would seat the next, and the time of a silent one is still to end.

    def _let_in(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTS_MAX):
            if len(self._others) >= STANDING_MAX:
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
            if (words := _first_words(sock)) is None:
                self._silent.add(sock)
                loop = asyncio.get_running_loop()
                loop.add_reader(sock, self._hear, sock)
                loop.call_later(SILENT_S, self._hear_no_more, sock)
            else:
                self._queue(sock, words)

    def _hear(self, sock: socket.socket) -> None:
        if (words := _first_words(sock)) is not None:
            asyncio.get_running_loop().remove_reader(sock)
            self._silent.discard(sock)
            self._queue(sock, words)

    def _hear_no_more(self, sock: socket.socket) -> None:
        """It is given a seat all the same, where there is a bound to how long one may be silent."""
        if sock in self._silent:
            asyncio.get_running_loop().remove_reader(sock)
            self._silent.remove(sock)
            self._queue(sock, b"")

    def _queue(self, sock: socket.socket, words: bytes) -> None:
        (self._probes if words.startswith(PROBES) else self._others).append(sock)
        self._seat_some()

    def _seat_some(self) -> None:
        """Those who come first, and all probes."""
        while self._probes:
            self._start_seating(self._probes.popleft())
        while self._others and len(self._seating) < SEATS_MAX:
            self._start_seating(self._others.popleft())

    def _start_seating(self, sock: socket.socket) -> None:
        self._seating[task := self._group.create_task(self._seat(sock))] = sock
        task.add_done_callback(self._on_seated)

    def _on_seated(self, task: "asyncio.Task[None]") -> None:
        sock = self._seating.pop(task)
        if task.cancelled():
            sock.close()
        else:
            self._seat_some()

    def _close_for_a_while(self, listener: socket.socket, why: str) -> None:
        log.warning("no room for more clients", why=why, again_in_s=FULL_S)
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener)
        loop.call_later(FULL_S, self._open_again, listener)

    def _open_again(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:  # It may have been closed meanwhile.
            asyncio.get_running_loop().add_reader(listener, self._let_in, listener)

    async def _seat(self, sock: socket.socket) -> None:
        """From here on the connection looks after itself."""
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self._make_connection, sock)
        except OSError as error:  # Its own misfortune, and nobody else's.
            log.debug("client lost at the door", why=str(error))
            sock.close()


def _first_words(sock: socket.socket) -> bytes | None:
    """What the client has said, which mostly comes with the connection; None: nothing yet."""
    try:
        return sock.recv(_WORDS_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    except OSError:  # It is gone; its connection will notice.
        return b""
