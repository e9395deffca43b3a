"""The gRPC server of every process: its services, health, reflection and channelz, on the port that it was given."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.core.gate import Gate
from services.rpc.inference_service import InferenceService
from services.rpc.server import GrpcServer
from services.runtime.process import StartupError
from services.stubs import inference_pb2_grpc
from tests.support.doubles import Script, run_async

SERVICE = "unbroken.v1.Inference"


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[GrpcServer, grpc.aio.Channel]]:
    async with GrpcServer([SERVICE]) as server:
        inference_pb2_grpc.add_InferenceServicer_to_server(InferenceService(Script(), Gate()), server.server)
        address = await server.start("127.0.0.1:0")
        async with grpc.aio.insecure_channel(address) as channel:
            yield server, channel


async def health_of(channel: grpc.aio.Channel, service: str) -> str:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


TRY_S = 3.0
"""How long one of several tries may take."""


def test_connection_beyond_the_bound_is_unavailable_until_another_ends() -> None:
    async def scenario() -> list[str]:
        seen = []
        async with GrpcServer([SERVICE], connections_max=1) as server:
            address = await server.start("127.0.0.1:0")
            await server.set_serving(is_serving=True)
            own = [("grpc.use_local_subchannel_pool", 1)]
            async with grpc.aio.insecure_channel(address, options=own) as first:
                seen.append(await health_of(first, SERVICE))
                async with grpc.aio.insecure_channel(address, options=own) as second:
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await health_of(second, SERVICE)
                    seen.append(caught.value.code().name)
            seen.append(await served_after_another_left(address))
        return seen

    assert run_async(scenario()) == ["SERVING", "UNAVAILABLE", "SERVING"]


async def served_after_another_left(address: str) -> str:
    """The server notices the end of a connection a little later. A new channel each time does not wait to reconnect."""
    while True:
        async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            try:
                async with asyncio.timeout(TRY_S):
                    return await health_of(channel, SERVICE)
            except (grpc.aio.AioRpcError, TimeoutError):
                continue


def test_health_of_the_server_and_of_each_service_is_what_the_process_sets() -> None:
    async def scenario() -> list[str]:
        seen = []
        async with serving() as (server, channel):
            for is_serving in (True, False, True):
                await server.set_serving(is_serving=is_serving)
                seen += [await health_of(channel, name) for name in ("", SERVICE)]
        return seen

    assert run_async(scenario()) == ["SERVING"] * 2 + ["NOT_SERVING"] * 2 + ["SERVING"] * 2


def test_health_is_not_serving_before_the_process_is_ready() -> None:
    async def scenario() -> list[str]:
        async with serving() as (_, channel):
            return [await health_of(channel, name) for name in ("", SERVICE)]

    assert run_async(scenario()) == ["NOT_SERVING"] * 2


def test_reflection_names_every_service() -> None:
    async def scenario() -> set[str]:
        async with serving() as (_, channel):
            call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            answer: Any = await call.read()
            await call.done_writing()
            return {service.name for service in answer.list_services_response.service}

    assert run_async(scenario()) >= {
        SERVICE,
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
        "grpc.channelz.v1.Channelz",
    }


def test_channelz_counts_the_server() -> None:
    async def scenario() -> int:
        async with serving() as (_, channel):
            answer = await channelz_pb2_grpc.ChannelzStub(channel).GetServers(channelz_pb2.GetServersRequest())
            return len(answer.server)

    assert run_async(scenario()) >= 1


def test_port_0_takes_a_free_port_and_returns_it() -> None:
    async def scenario() -> tuple[str, str]:
        async with GrpcServer([]) as first, GrpcServer([]) as second:
            return await first.start("127.0.0.1:0"), await second.start("127.0.0.1:0")

    first, second = run_async(scenario())

    assert first.startswith("127.0.0.1:")
    assert first != second


def test_port_in_use_is_reported_in_one_sentence_and_not_shared() -> None:
    async def scenario() -> None:
        async with GrpcServer([]) as first, GrpcServer([]) as second:
            await second.start(await first.start("127.0.0.1:0"))

    with pytest.raises(StartupError, match=r"cannot listen for gRPC on 127\.0\.0\.1:\d+: the port is in use; stop"):
        run_async(scenario())


def test_other_listen_errors_have_the_words_of_the_system() -> None:
    async def scenario() -> None:
        async with GrpcServer([]) as server:
            await server.start("192.0.2.1:0")

    with pytest.raises(
        StartupError, match=r"cannot listen for gRPC on 192\.0\.2\.1:0: Cannot assign requested address"
    ):
        run_async(scenario())


def test_exit_closes_the_port() -> None:
    async def scenario() -> None:
        async with GrpcServer([]) as server:
            address = await server.start("127.0.0.1:0")
        async with GrpcServer([]) as another:
            assert await another.start(address) == address

    run_async(scenario())
