"""Serves completions that never end, and gRPC's test service, until its input is closed. Prints its port."""

import asyncio
import sys
from typing import Any

import structlog

from services.core.flow.client_flow import ClientBounds
from services.http.server.config import HttpConfig
from services.runtime.loop import run_on_loop
from tests.http.grpc.interop_service import test_routes
from tests.http.support import Flood, serving

MIB = 1024 * 1024
CLIENT = ClientBounds(buffer_bytes_max=MIB)
BODY_BYTES_MAX = 16 * MIB


async def floods(request: Any, call: Any, sink: Any) -> Any:
    return await Flood("word " * 400)(request, call, sink)


async def main() -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # The parent reads stdout once.
    config = HttpConfig(client=CLIENT, body_bytes_max=BODY_BYTES_MAX)
    async with serving(floods, config=config, rpcs=test_routes()) as server:
        print(server.port, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    run_on_loop(main())
