"""The gRPC services that every process has: health and reflection."""

from collections.abc import Sequence
from typing import Any

from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc


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
        names = [*self._services, *self._always, health.SERVICE_NAME, reflection.SERVICE_NAME]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(reflection.aio.ReflectionServicer(names), server)

    async def set_serving(self, *, is_serving: bool) -> None:
        """Set what the health service answers, for the whole server and for each service."""
        status = health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self._services):
            await self._health.set(name, status)
        for name in self._always:
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
