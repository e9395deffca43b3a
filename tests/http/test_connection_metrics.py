"""ConnectionMetrics: a scrape tells how many connections are open, at all servers, and how many the process takes."""

import asyncio

from prometheus_client import CollectorRegistry

from services.http.connection_metrics import ConnectionMetrics
from services.runtime.descriptors.limit import connections_max, limit
from tests.http.support import Script, Server, run, serving
from tests.support.clock import WAIT_S


def test_open_connections_of_all_servers_are_counted_until_they_end() -> None:
    async def test() -> None:
        registry = CollectorRegistry()
        async with serving(Script()) as one, serving(Script()) as other:
            registry.register(ConnectionMetrics("p", [one.clients, other.clients]))
            writers = [(await opened(server))[1] for server in (one, one, other)]
            await until_counted(registry, 3)
            writers[0].close()
            await until_counted(registry, 2)

    run(test)


async def opened(server: Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await server.connect()
    writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
    await reader.readline()
    return reader, writer


async def until_counted(registry: CollectorRegistry, count: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while registry.get_sample_value("p_connections") != count:
            await asyncio.sleep(0.001)


def test_limit_is_what_the_limit_of_open_files_leaves() -> None:
    registry = CollectorRegistry()
    registry.register(ConnectionMetrics("p", []))

    assert registry.get_sample_value("p_connections_limit") == connections_max(limit())
