"""The service Admin over gRPC-Web is for tools that have the token, and for no page in a browser."""

from typing import Any

import grpc
import pytest

from services.core.flow.client_flow import ClientBounds
from services.frontend.api.admin.admin import NOT_FOR_PAGES, Admin, AdminConfig
from services.frontend.api.admin.grpc_service import SERVICE, AdminService, admin_guard
from services.frontend.routing.thresholds import AdmissionConfig, BusyThresholds
from services.http.app import HttpApp
from services.http.grpc.routes import GrpcRoutes
from services.http.grpc.web.routes import WebRoutes
from services.http.server.config import HttpConfig
from services.http.server.listener import Listen, http_server
from services.stubs import admin_pb2_grpc
from tests.frontend.support import alone
from tests.http.grpc.support import error_in, message
from tests.http.grpc.web.support import BINARY, ask
from tests.http.support import run
from tests.support.doubles import models_of

TOKEN = {"authorization": "Bearer secret"}
PAGE = {"origin": "https://chat.example"}


class Serving:
    """`address`: of a server."""

    def __init__(self, port: int) -> None:
        self.address = f"127.0.0.1:{port}"


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        (TOKEN, grpc.StatusCode.OK),
        ({}, grpc.StatusCode.UNAUTHENTICATED),
        (TOKEN | PAGE, grpc.StatusCode.UNAUTHENTICATED),
    ],
    ids=["token", "no token", "page"],
)
def test_calls_need_the_token_and_come_from_no_page(headers: dict[str, str], code: grpc.StatusCode) -> None:
    async def test() -> None:
        thresholds, rpcs = BusyThresholds(AdmissionConfig()), GrpcRoutes(ClientBounds())
        admin = Admin(AdminConfig(token="secret"), models_of(), thresholds, alone(thresholds))
        rpcs.guard(SERVICE, admin_guard(admin))
        rpcs.add(admin_pb2_grpc.add_AdminServicer_to_server, AdminService(admin))
        config = HttpConfig(cors_origins=("*",))
        app = HttpApp(config, config.body_bytes_max, lambda: False)
        WebRoutes(rpcs).add_to(app.routes)
        async with http_server(app, config, Listen("127.0.0.1:0"), rpcs=rpcs) as server:
            serving: Any = Serving(server.port)
            path = f"/{SERVICE}/ListBusyThresholds"
            answer = await ask(serving, "HTTP/1.1", path, message(b""), BINARY | headers)

        assert answer.code == code.value[0]
        assert "access-control-allow-origin" not in answer.headers
        assert answer.trailers is not None
        if code is not grpc.StatusCode.OK:
            info = error_in(answer.trailers)
            assert info.reason == "UNAUTHENTICATED"
            assert (info.metadata["hint"] == NOT_FOR_PAGES) == ("origin" in headers)

    run(test)
