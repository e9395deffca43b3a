"""Opens the sockets of an HTTP server, and serves an application on them."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from services.http.server.acceptor import Acceptor
from services.http.server.clients import Clients
from services.http.server.config import HttpConfig
from services.http.server.context import App, ConnectionContext, Rpcs
from services.http.server.cork import Cork
from services.http.server.detector import ConnectionFactory
from services.runtime import gc_control
from services.runtime.listen import cannot_listen, listening_sockets


@dataclass(frozen=True, slots=True)
class HttpServer:
    """A running server. `port`: the real one."""

    port: int
    context: ConnectionContext


@asynccontextmanager
async def http_server(
    app: App,
    config: HttpConfig,
    host: str,
    port: int,
    *,
    what: str = "HTTP",
    option: str = "--http-listen",
    is_shared: bool = False,
    cork: Cork | None = None,
    rpcs: Rpcs | None = None,
) -> AsyncIterator[HttpServer]:
    """Serve `app` at host:port; port 0 takes any free port. Raises StartupError if the address cannot be listened on.

    `what`, `option`: the service and the option that sets its address, for the error message. `is_shared`: other
    processes of the same frontend listen there too. `cork`: of the streams. `rpcs`: those that are served on the
    same port; None: none is.
    """
    try:
        listeners = listening_sockets(f"{host}:{port}", backlog=config.backlog, is_shared=is_shared)
    except OSError as error:
        raise cannot_listen(what, f"{host}:{port}", error, option=option) from error
    async with serve_sockets(app, config, listeners, cork, rpcs) as context:
        gc_control.register_clients(context.clients)
        yield HttpServer(listeners[0].getsockname()[1], context)


@asynccontextmanager
async def serve_sockets(
    app: App,
    config: HttpConfig,
    listeners: Sequence[socket.socket],
    cork: Cork | None = None,
    rpcs: Rpcs | None = None,
) -> AsyncIterator[ConnectionContext]:
    """Serve `app` on listening, non-blocking sockets, and close them at the end.

    The answer of a client that disconnects is cancelled. At the end, running answers may take `shutdown_s_max`.
    """
    async with asyncio.TaskGroup() as group:
        clients = Clients(config.keepalive_s)
        context = ConnectionContext(
            app=app, config=config, group=group, cork=cork or Cork(), clients=clients, rpcs=rpcs
        )
        acceptor = Acceptor(listeners, ConnectionFactory(context), group)
        clients.on_removed = acceptor.on_room
        try:
            yield context
        finally:
            acceptor.close()
            await clients.close(config.shutdown_s_max)
