"""A process without an HTTP service has `/metrics`, `/live` and `/health`, and closes them at once when it ends."""

import asyncio
import socket
from typing import Any

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, Counter

from services.http import ops_server as ops_server_module
from services.http.ops_server import ops_server
from services.http.server.config import HttpConfig
from services.runtime.process import StartupError
from tests.support.clock import WAIT_S
from tests.support.doubles import run_async


async def fetch(path: str, *, is_ready: bool = True) -> tuple[int, str, str]:
    metrics = CollectorRegistry()
    Counter("seen", "Seen.", registry=metrics).inc(3)
    async with (
        ops_server("127.0.0.1:0", metrics, lambda: is_ready) as address,
        aiohttp.ClientSession() as client,
        client.get(f"http://{address}{path}") as response,
    ):
        return response.status, response.headers["Content-Type"], await response.text()


def test_metrics_are_in_the_format_of_prometheus() -> None:
    status, kind, text = run_async(fetch("/metrics"))

    assert status == 200
    assert kind.startswith("text/plain; version=")
    assert "seen_total 3.0" in text


@pytest.mark.parametrize(
    ("is_ready", "status", "body"), [(True, 200, '{"status": "ready"}'), (False, 503, '{"status": "not_ready"}')]
)
def test_health_is_503_while_the_process_is_not_ready(is_ready: bool, status: int, body: str) -> None:
    assert run_async(fetch("/health", is_ready=is_ready)) == (status, "application/json; charset=utf-8", body)


def test_live_is_200_while_the_process_is_not_ready() -> None:
    expected = (200, "application/json; charset=utf-8", '{"status": "live"}')

    assert run_async(fetch("/live", is_ready=False)) == expected


def test_unknown_path_is_not_found() -> None:
    assert run_async(fetch("/"))[0] == 404


@pytest.mark.parametrize("path", ["/metrics", "/live", "/health"])
def test_head_is_answered_without_a_body_and_post_is_refused(path: str) -> None:
    async def scenario() -> None:
        async with (
            ops_server("127.0.0.1:0", CollectorRegistry(), lambda: True) as address,
            aiohttp.ClientSession(f"http://{address}") as client,
        ):
            async with client.head(path) as head, client.get(path) as get:
                assert (head.status, await head.read()) == (200, b"")
                assert head.headers["Content-Length"] == get.headers["Content-Length"]
            async with client.post(path, data=b"x") as post:
                assert (post.status, post.headers["Allow"]) == (405, "GET, HEAD")

    run_async(scenario())


@pytest.mark.parametrize(("listen", "host"), [("[::1]:0", "[::1]"), ("0.0.0.0:0", "127.0.0.1"), ("[::]:0", "[::1]")])
def test_address_in_use_is_returned_for_every_kind_of_host(listen: str, host: str) -> None:
    async def scenario() -> None:
        async with ops_server(listen, CollectorRegistry(), lambda: True) as address, aiohttp.ClientSession() as client:
            assert address.rpartition(":")[0] == listen.rpartition(":")[0]
            async with client.get(f"http://{host}:{address.rpartition(':')[2]}/live") as response:
                assert response.status == 200

    run_async(scenario())


def test_open_connections_do_not_delay_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops_server_module, "HttpConfig", lambda: HttpConfig(shutdown_s_max=2 * WAIT_S))

    async def scenario() -> None:
        async with ops_server("127.0.0.1:0", CollectorRegistry(), lambda: True) as address:
            host, _, port = address.rpartition(":")
            _, silent = await asyncio.open_connection(host, int(port))
            reader, kept = await asyncio.open_connection(host, int(port))
            kept.write(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
        for writer in (silent, kept):
            writer.close()

    run_async(scenario())


def start(listen: str) -> Any:
    async def scenario() -> None:
        async with ops_server(listen, CollectorRegistry(), lambda: True):
            pass

    return run_async(scenario())


def test_port_in_use_is_a_startup_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(
            StartupError, match=r"cannot listen for metrics on 127\.0\.0\.1:\d+: .*in use.*--metrics-port"
        ):
            start(f"127.0.0.1:{taken.getsockname()[1]}")


@pytest.mark.parametrize("listen", ["127.0.0.1", "127.0.0.1:", "127.0.0.1:http", "127.0.0.1:70000"])
def test_address_without_a_valid_port_is_a_startup_error(listen: str) -> None:
    with pytest.raises(StartupError, match="cannot listen on 127"):
        start(listen)
