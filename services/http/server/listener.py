"""Opens the sockets of an HTTP server, and serves an application on them."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import chain

from services.http.server.accept.acceptor import Acceptor
from services.http.server.clients import Clients
from services.http.server.config import HttpConfig
from services.http.server.context import App, ConnectionContext, Rpcs
from services.http.server.cork import Cork
from services.http.server.detector import ConnectionFactory
from services.http.server.secure import SecureFactory, Tls
from services.runtime import gc_control
from services.runtime.listen import cannot_listen, listening_sockets, split_listen
from services.runtime.tasks import root_cause


@dataclass(frozen=True, slots=True)
class Listen:
    """Where a server listens.

    `address`: host:port; port 0 takes any free port. `what`, `option`: the service and the option that sets its
    address, for the error message.
    """

    address: str
    what: str = "HTTP"
    option: str = "--http-listen"


@dataclass(frozen=True, slots=True)
class HttpServer:
    """A running server. `addresses`: the real ones, in the order in which they were given."""

    addresses: Sequence[str]
    context: ConnectionContext

    @property
    def port(self) -> int:
        """That of the first address."""
        return split_listen(self.addresses[0])[1]


@asynccontextmanager
async def http_server(
    app: App,
    config: HttpConfig,
    *listens: Listen,
    is_shared: bool = False,
    cork: Cork | None = None,
    rpcs: Rpcs | None = None,
    tls: Tls | None = None,
) -> AsyncIterator[HttpServer]:
    """Serve `app` at each of the addresses. Raises StartupError if one cannot be listened on.

    `is_shared`: other processes of the same frontend listen there too. `cork`: of the streams. `rpcs`: those that are
    served at the same addresses; None: none is. `tls`: how clients are served over TLS; None: they are not.
    """
    hosts = [split_listen(listen.address)[0] for listen in listens]
    opened = _opened(listens, config, is_shared=is_shared)
    ports = [listeners[0].getsockname()[1] for listeners in opened]
    listeners = list(chain.from_iterable(opened))
    async with serve_sockets(app, config, listeners, cork, rpcs, tls) as context:
        gc_control.register_clients(context.clients)
        yield HttpServer([f"{host}:{port}" for host, port in zip(hosts, ports, strict=True)], context)


def _opened(listens: Sequence[Listen], config: HttpConfig, *, is_shared: bool) -> list[list[socket.socket]]:
    """The sockets of each address. Raises StartupError."""
    opened: list[list[socket.socket]] = []
    for listen in listens:
        try:
            opened.append(listening_sockets(listen.address, backlog=config.backlog, is_shared=is_shared))
        except OSError as error:
            for listener in chain.from_iterable(opened):
                listener.close()
            raise cannot_listen(listen.what, listen.address, error, option=listen.option) from error
    return opened


@asynccontextmanager
async def serve_sockets(
    app: App,
    config: HttpConfig,
    listeners: Sequence[socket.socket],
    cork: Cork | None = None,
    rpcs: Rpcs | None = None,
    tls: Tls | None = None,
) -> AsyncIterator[ConnectionContext]:
    """Serve `app` on listening, non-blocking sockets, and close them at the end.

    The answer of a client that disconnects is cancelled. At the end, running answers may take `shutdown_s_max`.
    """
    try:
        async with asyncio.TaskGroup() as group:
            clients = Clients(config.keepalive_s)
            context = ConnectionContext(
                app=app, config=config, group=group, cork=cork or Cork(), clients=clients, rpcs=rpcs
            )
            plain = ConnectionFactory(context)
            secure = None if tls is None else SecureFactory(plain, tls)
            acceptor = Acceptor(listeners, secure or plain, group)
            clients.on_removed = acceptor.on_room
            if secure is not None:
                secure.handshakes.on_ended = acceptor.on_room
            try:
                yield context
            finally:
                acceptor.close()
                if secure is not None:
                    secure.handshakes.close()
                await clients.close(config.shutdown_s_max)
    except ExceptionGroup as errors:
        raise root_cause(errors) from None
