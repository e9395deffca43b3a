"""Makes the protocol of each new connection."""

import asyncio
from collections.abc import Mapping

from services.http.h1.connection import Connection
from services.http.server.context import ConnectionContext


class ConnectionFactory:
    """The connections of one server."""

    def __init__(self, context: ConnectionContext) -> None:
        self._context = context

    def make_connection(self, only_request: bytes | None = None) -> asyncio.BaseProtocol:
        """The protocol of a new connection. `only_request`: a whole request, after whose answer it closes."""
        return Connection(self._context, only_request)

    @property
    def takes_reserve(self) -> bool:
        return self._context.config.takes_reserve

    @property
    def connection_count(self) -> int:
        return len(self._context.clients)

    def no_room(self, path: str, headers: Mapping[str, str]) -> bytes:
        return self._context.app.no_room(path, headers)

    def on_paused(self) -> None:
        self._context.app.on_paused()
