"""Serves gRPC's test service, and prints its port."""

import asyncio

from services.http.app import HttpApp
from services.http.server.config import HttpConfig
from services.http.server.listener import Listen, http_server
from services.runtime.loop import run_on_loop
from tests.http.grpc.interop_service import test_routes

BODY_BYTES_MAX = 64 * 1024 * 1024


async def serve() -> None:
    """Serve until killed."""
    config = HttpConfig()
    app = HttpApp(config, BODY_BYTES_MAX, lambda: False)
    async with http_server(app, config, Listen("127.0.0.1:0"), rpcs=test_routes()) as server:
        print(server.port, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    run_on_loop(serve())
