"""Listens for HTTP clients."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from services.http.server.acceptor import Acceptor
from services.http.server.config import HttpConfig
from services.http.server.connection import App, Clients
from services.http.server.cork import Cork
from services.runtime import gc_control
from services.runtime.listen import cannot_listen, listening_sockets


@dataclass(frozen=True, slots=True)
class HttpServer:
    """port: the real one. clients: that are connected."""

    port: int
    clients: Clients


@asynccontextmanager
async def http_server(
    app: App,
    config: HttpConfig,
    host: str,
    port: int,
    *,
    option: str = "--http-listen",
    is_shared: bool = False,
    cork: Cork | None = None,
) -> AsyncIterator[HttpServer]:
    """Serve `app` at host:port; 0 takes any free port. At the end answers have `shutdown_s_max`.

    option: that which says where, for people. is_shared: whether other processes of the same frontend listen there too.
    cork: of the streams.
    A client that leaves has its answer cancelled, streamed or not. Raises StartupError when the address can't be had.
    """
    try:
        listeners = listening_sockets(f"{host}:{port}", backlog=config.backlog, is_shared=is_shared)
    except OSError as error:
        raise cannot_listen("HTTP", f"{host}:{port}", error, option=option) from error
    async with asyncio.TaskGroup() as group:
        clients = Clients(app, config, group, cork or Cork())
        gc_control.count_clients_of(clients)
        acceptor = Acceptor(listeners, clients, group)
        try:
            yield HttpServer(listeners[0].getsockname()[1], clients)
        finally:
            acceptor.close()
            await clients.close(config.shutdown_s_max)
