"""`/live` says that the process answers, `/health` whether requests can be served, and `/metrics` all metrics."""

import json

import pytest
from prometheus_client import Counter

from tests.http.support import Script, StubFrontend, error_of, run, serving


@pytest.mark.parametrize(
    ("frontend", "status", "code"),
    [
        (StubFrontend(), 200, None),
        (StubFrontend(cards=[]), 503, "NO_WORKERS"),
        (StubFrontend(is_draining=True), 503, "DRAINING"),
    ],
)
def test_health_is_503_with_the_reason_if_no_request_can_be_served(
    frontend: StubFrontend, status: int, code: str | None
) -> None:
    async def test() -> None:
        async with serving(Script(), catalog=frontend) as server:
            health, body = await server.get("/health")

        assert health.status == status
        if code is None:
            assert json.loads(body) == {"status": "ready", "models": ["org/tiny"]}
        else:
            assert error_of(body)["code"] == code
            assert health.headers["Retry-After"] == "1"

    run(test)


@pytest.mark.parametrize("frontend", [StubFrontend(), StubFrontend(cards=[]), StubFrontend(is_draining=True)])
def test_live_is_200_whatever_health_says(frontend: StubFrontend) -> None:
    async def test() -> None:
        async with serving(Script(), catalog=frontend) as server:
            live, body = await server.get("/live")

        assert (live.status, body) == (200, b'{"status":"live"}')

    run(test)


def test_health_distinguishes_unreachable_workers_from_no_workers() -> None:
    async def test() -> None:
        async with serving(Script(), catalog=StubFrontend(cards=[], unreached_count=1)) as server:
            _, body = await server.get("/health")

        assert "no worker is connected (registered: 1): see the log of this frontend" in error_of(body)["message"]

    run(test)


def test_health_names_the_registry_until_one_has_answered() -> None:
    async def test() -> None:
        async with serving(Script(), catalog=StubFrontend(cards=[], has_view=False)) as server:
            health, body = await server.get("/health")

        assert (health.status, error_of(body)["code"]) == (503, "NO_WORKERS")
        assert "no registry has answered this frontend yet" in error_of(body)["message"]

    run(test)


def test_metrics_are_in_the_format_of_prometheus() -> None:
    async def test() -> None:
        async with serving(Script()) as server:
            Counter("things", "Things.", registry=server.metrics).inc(3)
            response, body = await server.get("/metrics")

        assert response.headers["Content-Type"].startswith("text/plain; version=")
        assert b"things_total 3.0" in body

    run(test)
