"""The rpcs of a server. Generated code registers its services here as it does with grpc.aio's server."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc

from services.core.client_flow import ClientBounds
from services.http.grpc.messages import Decompressor
from services.http.grpc.metadata import Metadata
from services.http.grpc.rpc import Method, RejectedRpc, Rpc
from services.http.h2.request import Host
from services.http.h2.stream import Receiver, Stream
from services.http.h2.wire.fields import RequestHead

Guard = Callable[[str, Metadata], None]
"""Called with the path and the metadata of each rpc before its request is read. Raises RpcError or Failure."""


class GrpcRoutes:
    """Methods by path."""

    def __init__(self, bounds: ClientBounds) -> None:
        """`bounds`: how slowly a client may read the end of an answer."""
        self.bounds = bounds
        self.decompressor = Decompressor()
        self.guards: list[Guard] = []
        self._methods: dict[str, Method] = {}
        self._services: set[str] = set()

    def add_registered_method_handlers(
        self, service: str, handlers: Mapping[str, "grpc.RpcMethodHandler[Any, Any]"]
    ) -> None:
        """Called by generated code."""
        self._services.add(service)
        for name, handler in handlers.items():
            self._methods[f"/{service}/{name}"] = Method(handler)

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Called by generated code, for the methods that it has registered before."""

    def open(self, host: Host, stream: Stream, head: RequestHead) -> Receiver:
        """An rpc has begun to arrive. Returns what takes its content."""
        method = self._methods.get(head.path)
        if method is not None and head.method == "POST":
            return Rpc(host, stream, head, method, self)
        service = head.path[1:].partition("/")[0]
        what = "method" if service in self._services else "service"
        return RejectedRpc(host, stream, grpc.StatusCode.UNIMPLEMENTED, f"this server has no {what} {head.path[:200]}")
