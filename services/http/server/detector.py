"""Tells HTTP/2 from HTTP/1.1 by the first bytes of a connection, which may come one by one.

Source: RFC 9113, section 3.3, "prior knowledge", and section 3.4, the preface. Over TLS, a version that was agreed
on by ALPN is the only one.
"""

import asyncio
from collections.abc import Sequence

from services.http.h1.connection import Connection
from services.http.h2.connection import H2Connection
from services.http.h2.wire.frames import PREFACE
from services.http.server.context import ConnectionContext
from services.http.server.messages import HttpRequest, Response


class Detector(asyncio.Protocol):
    """The protocol of a new connection until its version is known. Meanwhile the connection counts as idle."""

    __slots__ = ("_agreed", "_context", "_received", "_transport")

    def __init__(self, context: ConnectionContext) -> None:
        self._context = context
        self._agreed: str | None = None
        self._received = b""
        self._transport: asyncio.Transport

    @property
    def tasks(self) -> Sequence[asyncio.Task[None]]:
        return ()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's transports are not of asyncio's class.
        if (tls := transport.get_extra_info("ssl_object")) is not None:
            self._agreed = tls.selected_alpn_protocol()
        self._context.clients.add(self)

    def data_received(self, data: bytes) -> None:
        data = self._received + data
        if self._agreed == "http/1.1":
            self._hand_over(Connection(self._context), data)
        elif data.startswith(PREFACE):
            self._hand_over(H2Connection(self._context), data[len(PREFACE) :])
        elif PREFACE.startswith(data):
            self._received = data
        elif self._agreed == "h2":
            self._transport.close()  # A GOAWAY may be left out: the client does not speak HTTP/2.
        else:
            self._hand_over(Connection(self._context), data)

    def _hand_over(self, connection: Connection | H2Connection, data: bytes) -> None:
        self._transport.set_protocol(connection)
        connection.connection_made(self._transport)
        self._context.clients.forget(self)
        if data:
            connection.data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._context.clients.remove(self)

    def drain(self) -> None:
        """The client has sent nothing that could be answered."""

    def leave(self) -> None:
        self._transport.close()

    close = leave

    def abort(self) -> None:
        self._transport.abort()


class ConnectionFactory:
    """Makes the connections of one server."""

    no_room_at_once = None

    def __init__(self, context: ConnectionContext) -> None:
        self._context = context

    def make_connection(self, only_request: bytes | None = None) -> asyncio.BaseProtocol:
        """The protocol of a new connection. `only_request`: a whole request, after whose answer it closes."""
        if only_request is None:
            return Detector(self._context)
        if only_request.startswith(PREFACE):
            return H2Connection(self._context, only_request[len(PREFACE) :])
        return Connection(self._context, only_request)

    @property
    def takes_reserve(self) -> bool:
        return self._context.config.takes_reserve

    def no_room(self, request: HttpRequest) -> Response:
        return self._context.app.no_room(request)

    def no_room_for_rpc(self) -> bytes | None:
        return None if self._context.rpcs is None else self._context.rpcs.no_room()

    def on_paused(self) -> None:
        self._context.app.on_paused()
