"""A server of gRPC's test service, and raw clients of it."""

import base64
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import grpc
from google.rpc import error_details_pb2, status_pb2

from services.core.errors import Failure
from services.core.flow.client_flow import ClientBounds
from services.core.tenant import TenantOf
from services.http.app import HttpApp
from services.http.grpc.routes import GrpcRoutes, Guard
from services.http.grpc.web.routes import WebRoutes
from services.http.host_rule import HostRule
from services.http.server.config import HttpConfig
from services.http.server.context import ConnectionContext
from services.http.server.listener import Listen, http_server
from tests.http.grpc.interop_service import SERVICE, TestService
from tests.http.h2.support import Client, connected
from tests.http.support import Server

HEADERS = {"content-type": "application/grpc", "te": "trailers"}
EMPTY_CALL = f"/{SERVICE}/EmptyCall"
UNARY_CALL = f"/{SERVICE}/UnaryCall"
OUTPUT_CALL = f"/{SERVICE}/StreamingOutputCall"
INPUT_CALL = f"/{SERVICE}/StreamingInputCall"


@dataclass
class Serving:
    """`address`: of a server that serves `service`."""

    address: str
    service: TestService
    routes: GrpcRoutes
    server: Any
    context: ConnectionContext = field(init=False)

    def __post_init__(self) -> None:
        self.context = self.server.context


@asynccontextmanager
async def serving_rpcs(
    *,
    config: HttpConfig | None = None,
    bounds: ClientBounds | None = None,
    guard: Guard | None = None,
    tenant_of: TenantOf | None = None,
    host_rule: HostRule = HostRule(),  # noqa: B008
    is_draining: Callable[[], bool] = lambda: False,
    on_refused: Callable[[str, Failure], None] = lambda *_: None,
) -> AsyncIterator[Serving]:
    """`guard`: of the service. `tenant_of`: clients need keys, but none for the service."""
    config, routes = config or HttpConfig(), GrpcRoutes(bounds or ClientBounds(), on_refused)
    service = TestService()
    service.register(routes)
    if guard is not None:
        routes.guard(SERVICE, guard)
    if tenant_of is not None:
        routes.open_to_strangers(SERVICE)
    app = HttpApp(config, config.body_bytes_max, is_draining, tenant_of=tenant_of, host_rule=host_rule)
    WebRoutes(routes).add_to(app.routes)
    async with http_server(app, config, Listen("127.0.0.1:0"), rpcs=routes) as listening:
        server: Any = Server(listening.port, None, None, None, listening.context)  # type: ignore[arg-type]
        try:
            yield Serving(f"127.0.0.1:{listening.port}", service, routes, server)
        finally:
            for writer in server.writers:
                writer.close()


@asynccontextmanager
async def raw_client(serving: Serving, **options: Any) -> AsyncIterator[Client]:
    async with connected(serving.server, **options) as client:
        yield client


@asynccontextmanager
async def stub_of(serving: Serving, **options: Any) -> AsyncIterator[Any]:
    """Callables of grpcio, by the name of the method."""
    async with grpc.aio.insecure_channel(serving.address, **options) as channel:
        yield Stub(channel, serving.service.types)


class Stub:
    """The methods, as generated code has them."""

    def __init__(self, channel: grpc.aio.Channel, types: dict[str, Any]) -> None:
        def method(kind: Any, name: str, request: str, response: str) -> Any:
            path = f"/{SERVICE}/{name}"
            return kind(
                path,
                request_serializer=types[request].SerializeToString,
                response_deserializer=types[response].FromString,
            )

        output = ("StreamingOutputCallRequest", "StreamingOutputCallResponse")
        incoming = ("StreamingInputCallRequest", "StreamingInputCallResponse")
        self.empty = method(channel.unary_unary, "EmptyCall", "Empty", "Empty")
        self.unary = method(channel.unary_unary, "UnaryCall", "SimpleRequest", "SimpleResponse")
        self.output = method(channel.unary_stream, "StreamingOutputCall", *output)
        self.input = method(channel.stream_unary, "StreamingInputCall", *incoming)
        self.duplex = method(channel.stream_stream, "FullDuplexCall", *output)


def message(content: bytes, *, flag: int = 0) -> bytes:
    """A message with its prefix."""
    return bytes((flag,)) + len(content).to_bytes(4, "big") + content


def error_in(fields: Mapping[str, str]) -> error_details_pb2.ErrorInfo:
    """The ErrorInfo of a status, which must agree with the status."""
    encoded = fields["grpc-status-details-bin"]
    status = status_pb2.Status.FromString(base64.b64decode(encoded + "=" * (-len(encoded) % 4)))
    assert (str(status.code), status.message) == (fields["grpc-status"], message_in(fields))
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    return info


def message_in(trailers: Mapping[str, str]) -> str:
    """The message of a status."""
    return unquote(trailers.get("grpc-message", ""))
