"""Metrics to scrape, a sign of life, and whether requests should come, for processes without an HTTP service."""

import socket
from typing import Any

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, Counter

from services.http.ops_server import ops_server
from services.runtime.process import StartupError
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
def test_health_is_503_while_no_requests_should_come(is_ready: bool, status: int, body: str) -> None:
    assert run_async(fetch("/health", is_ready=is_ready)) == (status, "application/json; charset=utf-8", body)


def test_live_is_200_while_no_requests_should_come() -> None:
    expected = (200, "application/json; charset=utf-8", '{"status": "live"}')

    assert run_async(fetch("/live", is_ready=False)) == expected


def test_unknown_path_is_not_found() -> None:
    assert run_async(fetch("/"))[0] == 404


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
