"""An application answers every request: with its route's response, or with the error envelope of what went wrong."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from structlog.testing import capture_logs

from services.core.errors import Failure, Reason
from services.http.app import HttpApp
from services.http.server.config import HttpConfig
from services.http.server.exchange import Exchange
from services.http.server.listener import Listen, http_server
from services.http.server.messages import HttpRequest, Response
from tests.support.doubles import run_async


@asynccontextmanager
async def serving(outcome: Response | Exception, **options: Any) -> AsyncIterator[int]:
    """An application whose only route, /it, has this outcome. Yields the port."""
    config = HttpConfig(overload_status=529, cors_origins=("*",))
    app = HttpApp(config, body_bytes_max=0, is_draining=lambda: options.get("is_draining", False))

    async def handle(request: HttpRequest, exchange: Exchange) -> Response:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    app.routes.get("/it", handle)
    async with http_server(app, config, Listen("127.0.0.1:0")) as server:
        yield server.port


def answer(sent: bytes, outcome: Response | Exception, **options: Any) -> tuple[int, dict[str, str], bytes]:
    """Status, headers by lower-case names, and body of the answer to `sent`."""

    async def test() -> bytes:
        async with serving(outcome, **options) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            body = await reader.readexactly(length)
            writer.close()
            return head + body

    head, _, body = run_async(test()).partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    return int(status.split()[1]), {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}, body


def get(path: str = "/it", headers: str = "") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n{headers}\r\n".encode()


def test_response_of_the_route_gets_the_request_id() -> None:
    status, headers, body = answer(get(headers="X-Request-Id: mine\r\n"), Response(b"fine"))

    assert (status, headers["x-request-id"], body) == (200, "mine", b"fine")


def test_failure_becomes_its_status_and_envelope() -> None:
    status, headers, body = answer(get(), Failure(Reason.OVERLOADED, "full"))

    assert (status, headers["retry-after"]) == (529, "1")
    assert json.loads(body)["error"]["request_id"] == headers["x-request-id"]


def test_bug_becomes_an_internal_error_and_is_logged() -> None:
    with capture_logs() as logs:
        status, _, body = answer(get(), ZeroDivisionError("a bug"))

    assert (status, json.loads(body)["error"]["code"]) == (500, "INTERNAL")
    assert [line["log_level"] for line in logs] == ["error"]


@pytest.mark.parametrize(("sent", "status"), [(get("/elsewhere"), 404), (get().replace(b"GET", b"POST"), 405)])
def test_request_without_a_route_gets_an_envelope_with_the_routes(sent: bytes, status: int) -> None:
    given, _, body = answer(sent, Response(b""))

    assert given == status
    assert json.loads(body)["error"]["hint"] == "There are GET /it."


def test_bytes_that_are_not_a_request_get_an_envelope_with_their_status() -> None:
    status, headers, body = answer(b"GET / HTTP/1.1\r\nTransfer-Encoding: x\r\n\r\n", Response(b""))

    assert (status, headers["connection"]) == (501, "close")
    assert json.loads(body)["error"]["code"] == "INVALID_ARGUMENT"


@pytest.mark.parametrize("sent", [get(), get("/elsewhere"), b"no HTTP\r\n\r\n"])
def test_every_response_has_the_cors_headers(sent: bytes) -> None:
    assert answer(sent, Response(b""))[1]["access-control-allow-origin"] == "*"


@pytest.mark.parametrize(("is_draining", "connection"), [(True, "close"), (False, None)])
def test_draining_application_closes_connections_after_their_answer(is_draining: bool, connection: str | None) -> None:
    assert answer(get(), Response(b""), is_draining=is_draining)[1].get("connection") == connection
