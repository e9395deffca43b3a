"""Serves HTTP over TLS: each connection is that of the plain server, within one that carries TLS."""

import asyncio
import ssl
from typing import Protocol

import structlog

from services.http.server.detector import ConnectionFactory
from services.http.server.messages import HttpRequest, Response
from services.runtime.log_throttle import LogThrottle
from services.tls.connection import TlsConnection
from services.tls.explain import is_departure, why_failed
from services.tls.handshakes import Handshakes

log = structlog.get_logger()

NO_ROOM = bytes((21, 3, 3, 0, 2, 2, 80))
"""The alert `internal_error`, for clients for whose connection there is no room. Source: RFC 8446, section 6."""
_PLAIN = b"This port speaks TLS: use https://, or give the gRPC client credentials for TLS.\n"
_PLAIN_REPLY = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b"
) % (len(_PLAIN), _PLAIN)
"""What a client is sent that does not speak TLS. gRPC clients report its status, too."""


class Tls(Protocol):
    """How a server speaks TLS. `failures`: counts handshakes that failed, besides those of clients that just left."""

    failures: int

    @property
    def context(self) -> ssl.SSLContext:
        """The context of the next connection."""
        ...

    def admit(self, tls: ssl.SSLObject) -> None:
        """Raises Refused if the peer, whose handshake is complete, may not come in."""
        ...


class SecureFactory:
    """Makes the connections of one server that speaks TLS. See Server in acceptor.py."""

    no_room_at_once = NO_ROOM

    def __init__(self, plain: ConnectionFactory, tls: Tls) -> None:
        """`plain`: makes the connections within."""
        self._plain = plain
        self._tls = tls
        self._throttle = LogThrottle()
        self.handshakes = Handshakes()

    def make_connection(self, only_request: bytes | None = None) -> asyncio.BaseProtocol:
        def make_inner(peer: ssl.SSLObject) -> asyncio.BaseProtocol:
            self._tls.admit(peer)
            return self._plain.make_connection(only_request)

        return TlsConnection(
            make_inner, self._tls.context, self.handshakes, on_failed=self._on_failed, plain_reply=_PLAIN_REPLY
        )

    def _on_failed(self, connection: TlsConnection, error: Exception) -> None:
        if is_departure(error):
            log.debug("a client left before the handshake", peer=connection.peer)
            return
        self._tls.failures += 1
        report = log.warning if self._throttle.should_log() else log.debug
        report(
            "a client could not connect over TLS", at=connection.address, peer=connection.peer, why=why_failed(error)
        )

    @property
    def takes_reserve(self) -> bool:
        return self._plain.takes_reserve

    def no_room(self, request: HttpRequest) -> Response:
        return self._plain.no_room(request)

    def no_room_for_rpc(self) -> bytes | None:
        return self._plain.no_room_for_rpc()

    def on_paused(self) -> None:
        self._plain.on_paused()
