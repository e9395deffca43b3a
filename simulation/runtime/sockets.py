"""What code that uses sockets directly sees instead of the module `socket`."""

import fcntl
import socket
import struct
import termios
from typing import TYPE_CHECKING, Any

from simulation.runtime.network import CHUNK_BYTES, Address, Endpoint, Listener

if TYPE_CHECKING:
    from simulation.runtime.world import World


class Socket:
    """A listening socket, or the end of an accepted connection."""

    def __init__(self, world: "World", end: Endpoint | Listener | None = None) -> None:
        self._world = world
        self._end = end
        self._bound: Address | None = None
        self._reader: Any = None

    # Listening

    def bind(self, address: Any) -> None:
        self._bound = self._world.network.bind(address[:2])

    def listen(self, _backlog: int = 0) -> None:
        assert self._bound is not None
        assert self._world.current is not None
        self._end = self._world.network.listen(self._world.current, self._bound)

    def accept(self) -> tuple["Socket", Address]:
        assert isinstance(self._end, Listener)
        if not self._end.queue:
            raise BlockingIOError
        endpoint = self._end.queue.popleft()
        return Socket(self._world, endpoint), endpoint.other.local

    def getsockname(self) -> Address:
        if self._end is None:
            assert self._bound is not None
            return self._bound
        return self._end.address if isinstance(self._end, Listener) else self._end.local

    def detach(self) -> Endpoint:
        """The endpoint, for a transport."""
        assert isinstance(self._end, Endpoint)
        return self._end

    def detach_listener(self) -> Listener:
        """The listener, for a server."""
        assert isinstance(self._end, Listener)
        return self._end

    # Reading and writing

    def recv(self, size: int, flags: int = 0) -> bytes:
        assert isinstance(self._end, Endpoint)
        if flags & socket.MSG_PEEK:
            if self._end.error is not None:
                raise self._end.error
            if not self._end.unread and not self._end.has_eof:
                raise BlockingIOError
            return bytes(self._end.unread[:size])
        return self._end.read(min(size, CHUNK_BYTES))

    def send(self, data: bytes) -> int:
        assert isinstance(self._end, Endpoint)
        return self._end.send(data)

    def shutdown(self, _how: int) -> None:
        assert isinstance(self._end, Endpoint)
        self._end.shut_down()

    def set_reader(self, reader: Any) -> bool:
        """Call `reader` while there is something to read; None: no more. Returns whether there was one."""
        had_one = self._reader is not None
        if self._end is None:
            return had_one
        self._reader = reader
        self._end.on_readable = None if reader is None else self._read
        if reader is not None and self._has_something:
            self._notify()
        return had_one

    @property
    def _has_something(self) -> bool:
        return bool(self._end.queue) if isinstance(self._end, Listener) else bool(self._end and self._end.is_readable)

    def _notify(self) -> None:
        if isinstance(self._end, Listener):
            self._end.notify()
        elif self._end is not None:
            self._end.notify_readable()

    def _read(self) -> None:
        if self._reader is not None:
            self._reader()
            if self._reader is not None and self._has_something and not (self._end and self._end.is_closed):
                self._notify()

    # The rest

    def close(self) -> None:
        end, self._reader = self._end, None
        if isinstance(end, Listener):
            self._world.network.close_listener(end)
        elif end is not None:
            end.close()

    def fileno(self) -> int:
        return -1 if self._end is None or self._end.is_closed else self._end.descriptor

    def setblocking(self, _flag: bool) -> None:
        """Nothing blocks here."""

    def setsockopt(self, *_: Any) -> None:
        """Nothing depends on it here."""

    def __enter__(self) -> "Socket":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SocketModule:
    """Stands for the module `socket`."""

    def __init__(self, world: "World") -> None:
        self._world = world

    def socket(self, *_: Any) -> Socket:
        return Socket(self._world)

    def create_server(self, address: Any, **_: Any) -> Socket:
        sock = Socket(self._world)
        sock.bind(address)
        sock.listen()
        return sock

    def getaddrinfo(self, host: str, port: int, **_: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port))]

    def __getattr__(self, name: str) -> Any:
        return getattr(socket, name)


class FcntlModule:
    """Stands for the module `fcntl`: how much of what was sent is not acknowledged."""

    def __init__(self, world: "World") -> None:
        self._world = world

    def ioctl(self, descriptor: int, request: int, _arg: bytes) -> bytes:
        assert request == termios.TIOCOUTQ
        assert self._world.current is not None
        return struct.pack("i", self._world.network.endpoint_of(self._world.current, descriptor).in_flight)

    def __getattr__(self, name: str) -> Any:
        return getattr(fcntl, name)
