"""The gRPC server of every process: its own services, and health, reflection and channelz."""

import errno
import json
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # What grpc_channelz calls: its messages take longer.
from grpc_channelz.v1 import channelz
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc
from grpc_reflection.v1alpha._async import ReflectionServicer

from services.rpc.interceptors import RefuseUndecodable
from services.rpc.status import SERVER_OPTIONS, SHARED_SERVER_OPTIONS
from services.runtime.descriptors.limit import grpc_connections_max, limit
from services.runtime.listen import bind_error, cannot_listen, split_listen

CLOSE_GRACE_S = 0.5
CONNECTIONS_OPTION = "grpc.max_allowed_incoming_connections"


class GrpcServer:
    """Listens from `start` on. `set_serving` drives the health service. An async context manager: it closes on exit."""

    def __init__(
        self,
        services: Sequence[str],
        *,
        always: Sequence[str] = (),
        guards: Sequence[grpc.aio.ServerInterceptor] = (),
        is_shared: bool = False,
        connections_max: int | None = None,
    ) -> None:
        """`services`: full names of the services that are added to `server`, for health and reflection.

        `always`: names of further services, whose health does not depend on `set_serving`. `guards`: interceptors that
        see each rpc before its request is read. `is_shared`: other processes of the frontend listen on the same port.
        `connections_max`: further connections are closed at once, and their clients see UNAVAILABLE; None: a share of
        the limit of open files. gRPC cannot answer them, and without a bound they would take all descriptors.
        """
        self.connections_max = most = connections_max or grpc_connections_max(limit())
        options = [*(SHARED_SERVER_OPTIONS if is_shared else SERVER_OPTIONS), (CONNECTIONS_OPTION, most)]
        self.server = grpc.aio.server(options=options, interceptors=[*guards, RefuseUndecodable()])
        self._id = max(
            int(server["ref"]["serverId"]) for server in json.loads(cygrpc.channelz_get_servers(0))["server"]
        )
        self._services = services
        self._always = always
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        channelz.add_channelz_servicer(self.server)
        reflection.enable_server_reflection(
            [*services, *always, health.SERVICE_NAME, reflection.SERVICE_NAME, "grpc.channelz.v1.Channelz"], self.server
        )

    def add_common_services(self, routes: Any) -> None:
        """Serve health and reflection on another server as well, with the same answers. `routes`: see GrpcRoutes."""
        names = [*self._services, *self._always, health.SERVICE_NAME, reflection.SERVICE_NAME]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, routes)
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(ReflectionServicer(names), routes)

    async def start(self, listen: str, *, option: str = "--listen") -> str:
        """Listen on `host:port` and return the actual address. Health is NOT_SERVING until `set_serving`.

        Raises StartupError if that fails. `option`: the option that sets the address, for the error message.
        """
        host, _port = split_listen(listen)
        try:
            port = self.server.add_insecure_port(listen)
        except RuntimeError as error:  # It does not say why, so ask the system.
            why = bind_error(listen) or OSError(errno.EADDRINUSE, "it was in use, and is free again")
            raise cannot_listen("gRPC", listen, why, option=option) from error
        await self.set_serving(is_serving=False)  # Otherwise health is SERVING for the server as a whole.
        await self.server.start()
        return f"{host}:{port}"

    def connection_count(self) -> int:
        """The open connections. It takes 4 µs for each."""
        count, start = 0, 0
        while True:
            page = json.loads(cygrpc.channelz_get_server_sockets(self._id, start, 0))
            sockets = page.get("socketRef")
            if not sockets:
                return count
            count += len(sockets)
            start = int(sockets[-1]["socketId"]) + 1

    async def set_serving(self, *, is_serving: bool) -> None:
        """Set what the health service answers, for the whole server and for each service."""
        status = health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self._services):
            await self._health.set(name, status)
        for name in self._always:
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def __aenter__(self) -> "GrpcServer":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.server.stop(CLOSE_GRACE_S)
