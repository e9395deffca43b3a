"""CommonServices: health is what the process sets, and reflection names every service."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from structlog.testing import capture_logs

from services.core.gate import Gate
from services.http.grpc.routes import GrpcRoutes
from services.http.rpc_server import rpc_server
from services.rpc.common_services import CommonServices
from services.rpc.inference_service import InferenceService
from services.stubs import inference_pb2_grpc
from tests.support.doubles import Script, run_async

SERVICE, ADMIN = "unbroken.v1.Inference", "unbroken.v1.Admin"


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[CommonServices, grpc.aio.Channel]]:
    rpcs, common = GrpcRoutes(), CommonServices([SERVICE], always=[ADMIN])
    common.add_to(rpcs)
    rpcs.add(inference_pb2_grpc.add_InferenceServicer_to_server, InferenceService(Script(), Gate()))
    async with (
        rpc_server(rpcs, "127.0.0.1:0") as server,
        grpc.aio.insecure_channel(server.addresses[0]) as channel,
    ):
        yield common, channel


async def health_of(channel: grpc.aio.Channel, service: str) -> str:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def test_health_of_the_server_and_of_each_service_is_what_the_process_sets() -> None:
    async def scenario() -> list[list[str]]:
        seen = []
        async with serving() as (common, channel):
            for is_serving in (True, False, True):
                await common.set_serving(is_serving=is_serving)
                seen.append([await health_of(channel, name) for name in ("", SERVICE, ADMIN)])
        return seen

    serving_all = ["SERVING"] * 3
    assert run_async(scenario()) == [serving_all, ["NOT_SERVING", "NOT_SERVING", "SERVING"], serving_all]


def test_watch_tells_each_change_of_health() -> None:
    async def scenario() -> list[str]:
        seen = []
        async with serving() as (common, channel):
            await common.set_serving(is_serving=False)
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
            for is_serving in (True, False):
                seen.append((await watch.read()).status)
                await common.set_serving(is_serving=is_serving)
            seen.append((await watch.read()).status)
        return [health_pb2.HealthCheckResponse.ServingStatus.Name(status) for status in seen]

    assert run_async(scenario()) == ["NOT_SERVING", "SERVING", "NOT_SERVING"]


def test_health_of_a_service_that_does_not_exist_is_not_found() -> None:
    async def scenario() -> grpc.StatusCode:
        async with serving() as (_, channel):
            try:
                await health_of(channel, "no.such.Service")
            except grpc.aio.AioRpcError as error:
                return error.code()
        return grpc.StatusCode.OK

    assert run_async(scenario()) is grpc.StatusCode.NOT_FOUND


def test_method_that_the_library_lacks_is_unimplemented_and_no_bug() -> None:
    async def scenario() -> grpc.StatusCode:
        async with serving() as (_, channel):
            call: Any = channel.unary_unary("/grpc.health.v1.Health/List")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(b"")
        return caught.value.code()

    with capture_logs() as logs:
        assert run_async(scenario()) is grpc.StatusCode.UNIMPLEMENTED
    assert logs == []


@pytest.mark.parametrize("version", ["v1alpha", "v1"])
def test_reflection_names_every_service_and_describes_itself(version: str) -> None:
    """Newer tools ask for its final name, older ones for the other."""
    name = f"grpc.reflection.{version}.ServerReflection"

    async def scenario() -> tuple[set[str], str]:
        async with serving() as (_, channel):
            ask: Any = channel.stream_stream(
                f"/{name}/ServerReflectionInfo",
                request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
                response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
            )
            call = ask()
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            listed = {service.name for service in (await call.read()).list_services_response.service}
            await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=name))
            [file] = (await call.read()).file_descriptor_response.file_descriptor_proto
            await call.done_writing()
            return listed, descriptor_pb2.FileDescriptorProto.FromString(file).package

    listed, package = run_async(scenario())

    assert package == f"grpc.reflection.{version}"
    assert listed == {
        SERVICE,
        ADMIN,
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
    }
