"""gRPC services on a real port."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from services.core.flow.client_flow import ClientBounds
from services.http.grpc.routes import DEFAULT_BOUNDS, GrpcRoutes, Guard
from services.http.rpc_server import rpc_server


@asynccontextmanager
async def serving_at(
    *services: tuple[Callable[..., None], Any],
    bounds: ClientBounds = DEFAULT_BOUNDS,
    guards: Mapping[str, Guard] = {},
    port: int = 0,
) -> AsyncIterator[str]:
    """Serve the services, each with the generated function that registers it. Yields the address."""
    rpcs = GrpcRoutes(bounds)
    for service, guard in guards.items():
        rpcs.guard(service, guard)
    for add_to_server, servicer in services:
        rpcs.add(add_to_server, servicer)
    async with rpc_server(rpcs, f"127.0.0.1:{port}") as server:
        yield server.addresses[0]
