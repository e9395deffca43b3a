"""One HTTP request and its response, whatever version of HTTP carries it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from simulation.clients.connection import Connection


class Exchange(ABC):
    """On a connection of its own. `body`: what has come of the response and is not used yet."""

    def __init__(self, *, is_slow: bool) -> None:
        """`is_slow`: the client lets the server send little ahead of what it reads."""
        self._connection = Connection()
        self._is_slow = is_slow
        self.status = 0
        self.body = bytearray()
        self.has_ended = False

    async def open_to(self, frontend: int) -> str:
        """Connect. Returns why that failed; empty: it did not."""
        return await self._connection.open_to(frontend)

    @abstractmethod
    def send(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> None:
        """Send the request."""

    async def read(self) -> str:
        """Wait for more of the response. Returns why nothing more comes; empty: something has come."""
        data = await self._connection.read()
        return data if isinstance(data, str) else self._receive(data)

    @abstractmethod
    def _receive(self, data: bytes) -> str: ...

    @abstractmethod
    def pause(self) -> None:
        """Take nothing from the server."""

    @abstractmethod
    def resume(self) -> None:
        """Go on after a pause."""

    def abort(self) -> None:
        """Drop the connection."""
        if self._connection.transport is not None:
            self._connection.transport.abort()
