"""The service of gRPC's interoperability tests, on the server in services/http/grpc.

Source: doc/interop-test-descriptions.md of github.com/grpc/grpc.
"""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from services.core.flow.client_flow import ClientBounds
from services.http.grpc.routes import GrpcRoutes

PROTO = Path(__file__).resolve().parents[2] / "clients" / "grpc_interop" / "interop.proto"
SERVICE = "grpc.testing.TestService"
ECHOED = ("x-grpc-test-echo-initial", "x-grpc-test-echo-trailing-bin")


@cache
def messages() -> dict[str, Any]:
    """The classes of the messages, by name."""
    buf = Path(sys.executable).parent / "buf"
    command = [str(buf), "build", str(PROTO.parent), "--path", str(PROTO), "--output", "-#format=binpb"]
    built = subprocess.run(command, check=True, capture_output=True)
    files = descriptor_pb2.FileDescriptorSet.FromString(built.stdout)
    classes = message_factory.GetMessages(files.file, pool=descriptor_pool.DescriptorPool())
    return {name.rpartition(".")[2]: one for name, one in classes.items()}


class TestService:
    """The methods. `cancelled`: set when a client has cancelled a rpc."""

    __test__ = False

    def __init__(self) -> None:
        self.types = dict(messages())
        self.cancelled = asyncio.Event()

    def register(self, routes: GrpcRoutes) -> None:
        """Register the methods as generated code does."""
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
        handlers = {
            "EmptyCall": self._handler(unary, self.empty, "Empty", "Empty"),
            "UnaryCall": self._handler(unary, self.unary, "SimpleRequest", "SimpleResponse"),
            "StreamingOutputCall": self._handler(
                grpc.unary_stream_rpc_method_handler,
                self.output,
                "StreamingOutputCallRequest",
                "StreamingOutputCallResponse",
            ),
            "StreamingInputCall": self._handler(
                grpc.stream_unary_rpc_method_handler,
                self.input,
                "StreamingInputCallRequest",
                "StreamingInputCallResponse",
            ),
            "FullDuplexCall": self._handler(
                stream, self.duplex, "StreamingOutputCallRequest", "StreamingOutputCallResponse"
            ),
        }
        routes.add_registered_method_handlers(SERVICE, handlers)

    def _handler(self, kind: Any, behaviour: Any, request: str, response: str) -> Any:
        return kind(
            behaviour,
            request_deserializer=self.types[request].FromString,
            response_serializer=self.types[response].SerializeToString,
        )

    async def empty(self, request: Any, context: Any) -> Any:
        return self.types["Empty"]()

    async def unary(self, request: Any, context: Any) -> Any:
        await self._echo(context)
        if request.response_status.code:
            await self._end(request.response_status, context)
        return self.types["SimpleResponse"](payload=self._payload(request.response_size))

    async def output(self, request: Any, context: Any) -> None:
        await self._send(request, context)

    async def input(self, requests: AsyncIterator[Any], context: Any) -> Any:
        try:
            size = sum([len(request.payload.body) async for request in requests])
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return self.types["StreamingInputCallResponse"](aggregated_payload_size=size)

    async def duplex(self, requests: AsyncIterator[Any], context: Any) -> None:
        await self._echo(context)
        async for request in requests:
            if request.response_status.code:
                await self._end(request.response_status, context)
            await self._send(request, context)

    async def _send(self, request: Any, context: Any) -> None:
        for parameters in request.response_parameters:
            await asyncio.sleep(parameters.interval_us * 1e-6)
            await context.write(self.types["StreamingOutputCallResponse"](payload=self._payload(parameters.size)))

    def _payload(self, size: int) -> Any:
        return self.types["Payload"](body=bytes(size))

    async def _echo(self, context: Any) -> None:
        metadata = dict(context.invocation_metadata())
        initial, trailing = ECHOED
        if initial in metadata:
            context.send_head(((initial, metadata[initial]),))
        if trailing in metadata:
            context.trailing = ((trailing, metadata[trailing]),)

    async def _end(self, status: Any, context: Any) -> None:
        codes = {code.value[0]: code for code in grpc.StatusCode}
        await context.abort(codes[status.code], status.message)


def test_routes() -> GrpcRoutes:
    """The routes of the service."""
    routes = GrpcRoutes(ClientBounds())
    TestService().register(routes)
    return routes


test_routes.__test__ = False  # type: ignore[attr-defined]
