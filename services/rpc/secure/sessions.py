"""Sessions over TLS: the same frames, between processes that have shown each other their roles."""

import asyncio
import ssl
from typing import Any

from services.core.errors import Failure, Reason
from services.rpc.framing import FrameConnection, framed
from services.stubs import worker_pb2
from services.tls.connection import Refused, TlsConnection
from services.tls.explain import why_failed
from services.tls.handshakes import Handshakes
from services.tls.peers import Peers
from services.tls.roles import Role

NEEDS_TLS = "this worker serves sessions over TLS only: give the frontend a certificate (--peer-cert)"


def refusal(why: str) -> bytes:
    """What a worker sends to a peer that it does not serve."""
    return framed(worker_pb2.WorkerMessage(refusal=why))


async def connect(connection: FrameConnection[Any], host: str, port: int, peers: Peers | None) -> None:
    """Connect to a worker, over TLS unless `peers` is None. Raises OSError, and CANNOT_CONNECT if TLS fails."""
    loop = asyncio.get_running_loop()
    if peers is None:
        await loop.create_connection(lambda: connection, host, port)
        return
    done: asyncio.Future[None] = loop.create_future()

    def make_inner(tls: ssl.SSLObject) -> FrameConnection[Any]:
        peers.check_server(tls, Role.WORKER)
        if not done.done():
            done.set_result(None)
        return connection

    def on_failed(_: TlsConnection, error: Exception) -> None:
        if not done.done():
            done.set_exception(Failure(Reason.CANNOT_CONNECT, f"TLS with the worker failed: {why_failed(error)}"))

    def make() -> TlsConnection:
        context = peers.loaded.client
        return TlsConnection(make_inner, context, Handshakes(), on_failed=on_failed, is_server=False)

    _, secure = await loop.create_connection(make, host, port)
    try:
        await done
    except asyncio.CancelledError:
        secure.expire("the frontend waits no longer")
        raise


class SecureSessions:
    """Makes the connections of a worker's sessions over TLS."""

    def __init__(self, peers: Peers, roles: frozenset[Role]) -> None:
        """`roles`: who may open a session."""
        self._peers = peers
        self._roles = roles
        self.handshakes = Handshakes()

    def wrap(self, connection: FrameConnection[Any], on_failed: Any) -> TlsConnection:
        """The protocol for TCP around a session's connection. `on_failed`: see TlsConnection."""

        def make_inner(tls: ssl.SSLObject) -> FrameConnection[Any]:
            try:
                self._peers.check_client(tls, self._roles, "sessions with workers are for the role")
            except Refused as refused:
                refused.parting = refusal(str(refused))
                raise
            return connection

        return TlsConnection(
            make_inner,
            self._peers.loaded.context,
            self.handshakes,
            on_failed=on_failed,
            plain_reply=refusal(NEEDS_TLS),
        )
