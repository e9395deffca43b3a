"""The gRPC services that every process has: health and reflection."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc


@cache
def _reflection_v1() -> str:
    """The final name of reflection, which can be reflected as well.

    grpcio-reflection has it under `v1alpha` alone. The messages of both are the same, and newer tools ask for this one.
    """
    text = text_format.MessageToString(
        descriptor_pb2.FileDescriptorProto.FromString(reflection_pb2.DESCRIPTOR.serialized_pb)
    )
    file = text_format.Parse(text.replace("v1alpha", "v1"), descriptor_pb2.FileDescriptorProto())
    descriptor_pool.Default().AddSerializedFile(file.SerializeToString())
    return f"{file.package}.{file.service[0].name}"


HEALTH_SERVICE: str = health.SERVICE_NAME
REFLECTION_SERVICES = (reflection.SERVICE_NAME, _reflection_v1())


class CommonServices:
    """Health and reflection for the services of a server.

    Call `set_serving` before the server listens: until then, it counts as healthy.
    """

    def __init__(self, services: Sequence[str], *, always: Sequence[str] = ()) -> None:
        """`services`: full names. `always`: names of further services, which are healthy as long as they answer."""
        self._services = services
        self._always = always
        self._health = health.aio.HealthServicer()

    def add_to(self, server: Any) -> None:
        """Register both with a server that takes what generated code registers."""
        names = [*self._services, *self._always, health.SERVICE_NAME, *REFLECTION_SERVICES]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        servicer = reflection.aio.ReflectionServicer(names)
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
        handler = grpc.stream_stream_rpc_method_handler(
            servicer.ServerReflectionInfo,
            reflection_pb2.ServerReflectionRequest.FromString,
            reflection_pb2.ServerReflectionResponse.SerializeToString,
        )
        server.add_registered_method_handlers(_reflection_v1(), {"ServerReflectionInfo": handler})

    async def set_serving(self, *, is_serving: bool) -> None:
        """Set what the health service answers, for the whole server and for each service."""
        status = health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self._services):
            await self._health.set(name, status)
        for name in self._always:
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
