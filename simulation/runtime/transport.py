"""Transports and servers: what asyncio's protocols see of endpoints and listeners."""

import asyncio
from collections.abc import Callable
from typing import Any

from simulation.runtime.network import Endpoint, Listener, Network

HIGH_WATER_BYTES = 64 * 1024


class Transport(asyncio.Transport):
    """Behaves as uvloop's."""

    def __init__(self, endpoint: Endpoint, protocol: Any) -> None:
        super().__init__()
        self._endpoint = endpoint
        self._protocol = protocol
        self._loop = endpoint.process.loop
        self._unsent = bytearray()
        self._high, self._low = HIGH_WATER_BYTES, HIGH_WATER_BYTES // 4
        self._is_paused = self._is_full = self._is_closing = self._ends = self._is_lost = False
        endpoint.on_readable = self._read
        endpoint.on_writable = self._flush
        self._loop.call_soon(self._begin)

    def _begin(self) -> None:
        self._protocol.connection_made(self)
        if self._endpoint.is_readable:
            self._endpoint.notify_readable()

    # Reading

    def _read(self) -> None:
        if self._is_paused or self._is_lost or self._is_closing:
            return
        try:
            data = self._endpoint.read()
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(error)
            return
        if data:
            self._protocol.data_received(data)
            if self._endpoint.is_readable and not self._endpoint.is_closed:
                self._endpoint.notify_readable()
        elif not self._protocol.eof_received():
            self.close()

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        if self._is_paused:
            self._is_paused = False
            if self._endpoint.is_readable:
                self._endpoint.notify_readable()

    def is_reading(self) -> bool:
        return not self._is_paused

    # Writing

    def write(self, data: Any) -> None:
        if self._is_lost or self._ends or (self._is_closing and not self._unsent):
            return
        self._unsent += data
        self._flush()
        if len(self._unsent) > self._high and not self._is_full:
            self._is_full = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def _flush(self) -> None:
        if self._is_lost:
            return
        try:
            sent = self._endpoint.send(bytes(self._unsent)) if self._unsent else 0
        except OSError as error:
            self._lose(error)
            return
        if self._endpoint.error is not None:
            self._lose(self._endpoint.error)
            return
        del self._unsent[:sent]
        if self._is_full and len(self._unsent) <= self._low:
            self._is_full = False
            self._protocol.resume_writing()
        if not self._unsent and not self._is_lost:
            if self._is_closing:
                self._lose(None)
            elif self._ends:
                self._endpoint.shut_down()

    def write_eof(self) -> None:
        if not self._ends and not self._is_closing:
            self._ends = True
            if not self._unsent:
                self._endpoint.shut_down()

    def can_write_eof(self) -> bool:
        return True

    def get_write_buffer_size(self) -> int:
        return len(self._unsent)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = HIGH_WATER_BYTES if high is None else high
        self._low = self._high // 4 if low is None else low
        if len(self._unsent) > self._high and not self._is_full:
            self._is_full = True
            self._protocol.pause_writing()

    # Ending

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            if not self._unsent:
                self._lose(None)

    def abort(self) -> None:
        self._is_closing = True
        self._unsent.clear()
        self._lose(None, resets=True)

    def is_closing(self) -> bool:
        return self._is_closing

    def _lose(self, error: OSError | None, *, resets: bool = False) -> None:
        if self._is_lost:
            return
        self._is_lost = self._is_closing = True
        self._endpoint.close(resets=resets)
        self._loop.call_soon(self._protocol.connection_lost, error)

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol

    def get_protocol(self) -> Any:
        return self._protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "socket":
            return self
        if name == "peername":
            return self._endpoint.other.local
        return self._endpoint.local if name == "sockname" else default

    def fileno(self) -> int:
        """As a socket."""
        return self._endpoint.descriptor

    def setsockopt(self, *_: Any) -> None:
        """As a socket: nothing depends on it here."""


class Server:
    """Accepts all connections of a listening socket. What `create_server` returns."""

    def __init__(self, network: Network, listener: Listener, protocol_factory: Callable[[], Any]) -> None:
        self._network = network
        self._listener = listener
        self._factory = protocol_factory
        listener.on_readable = self._accept
        self._accept()

    def _accept(self) -> None:
        while self._listener.queue:
            Transport(self._listener.queue.popleft(), self._factory())

    def close(self) -> None:
        self._network.close_listener(self._listener)
