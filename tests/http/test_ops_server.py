"""The operator's side: metrics to scrape, a sign of life, and whether traffic should come."""

import socket
from typing import Any

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, Counter

from services.http.ops_server import start_ops
from services.runtime.process import StartupError
from tests.support.doubles import run_async


async def fetch(path: str, *, is_ready: bool = True) -> tuple[int, str, str]:
    metrics = CollectorRegistry()
    Counter("seen", "Seen.", registry=metrics).inc(3)
    runner, address = await start_ops("127.0.0.1:0", metrics, lambda: is_ready)
    try:
        async with aiohttp.ClientSession() as client, client.get(f"http://{address}{path}") as response:
            return response.status, response.headers["Content-Type"], await response.text()
    finally:
        await runner.cleanup()


def test_metrics_are_what_prometheus_reads() -> None:
    status, kind, text = run_async(fetch("/metrics"))

    assert status == 200
    assert kind.startswith("text/plain; version=")
    assert "seen_total 3.0" in text


@pytest.mark.parametrize(("is_ready", "status"), [(True, 200), (False, 503)])
def test_health_is_503_when_no_traffic_should_come(is_ready: bool, status: int) -> None:
    assert run_async(fetch("/health", is_ready=is_ready))[0] == status


def test_live_is_200_even_then() -> None:
    assert run_async(fetch("/live", is_ready=False))[0] == 200


def test_anything_else_is_not_found() -> None:
    assert run_async(fetch("/"))[0] == 404


def start(listen: str) -> Any:
    async def scenario() -> None:
        runner, _ = await start_ops(listen, CollectorRegistry(), lambda: True)
        await runner.cleanup()

    return run_async(scenario())


def test_a_port_in_use_is_said_in_a_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(StartupError, match=r"cannot listen for metrics on 127\.0\.0\.1:\d+: .*in use"):
            start(f"127.0.0.1:{taken.getsockname()[1]}")


@pytest.mark.parametrize("listen", ["127.0.0.1", "127.0.0.1:", "127.0.0.1:http", "127.0.0.1:70000"])
def test_an_address_without_a_port_is_said_in_a_sentence(listen: str) -> None:
    with pytest.raises(StartupError, match="cannot listen on 127"):
        start(listen)
