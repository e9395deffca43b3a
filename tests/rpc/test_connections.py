"""ConnectionMetrics: a scrape tells how many gRPC connections are open, and how many a server takes."""

import asyncio

import grpc
from prometheus_client import CollectorRegistry

from services.rpc.connections import ConnectionMetrics
from services.rpc.server import GrpcServer
from tests.support.clock import WAIT_S
from tests.support.doubles import run_async

OWN = [("grpc.use_local_subchannel_pool", 1)]


def test_open_connections_of_one_server_are_counted_until_they_end() -> None:
    async def scenario() -> list[int]:
        seen = []
        async with GrpcServer([]) as server, GrpcServer([]) as other:
            address = await server.start("127.0.0.1:0")
            channels = [grpc.aio.insecure_channel(to, options=OWN) for to in (address, address)]
            channels.append(grpc.aio.insecure_channel(await other.start("127.0.0.1:0")))
            for channel in channels:
                await channel.channel_ready()
            seen += [server.connection_count(), other.connection_count()]
            await channels[0].close()
            async with asyncio.timeout(WAIT_S):
                while server.connection_count() > 1:
                    await asyncio.sleep(0.01)
            for channel in channels[1:]:
                await channel.close()
        return seen

    assert run_async(scenario()) == [2, 1]


def test_scrape_tells_the_connections_and_their_limit() -> None:
    async def scenario() -> tuple[float | None, ...]:
        registry = CollectorRegistry()
        async with GrpcServer([], connections_max=1) as server:
            registry.register(ConnectionMetrics("p", server))
            async with grpc.aio.insecure_channel(await server.start("127.0.0.1:0")) as channel:
                await channel.channel_ready()
                names = ("p_grpc_connections", "p_grpc_connections_limit")
                return tuple(registry.get_sample_value(name) for name in names)

    assert run_async(scenario()) == (1, 1)
