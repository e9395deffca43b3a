"""wait_served returns the models of a frontend once it is healthy, and explains why it never became so."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from services.cluster.cluster import first_request
from services.cluster.health import wait_served
from services.runtime.process import StartupError
from tests.support.clock import WAIT_S
from tests.support.doubles import run_async


@asynccontextmanager
async def frontend(*statuses: int, needs_key: bool = False) -> AsyncIterator[str]:
    """A server whose /health answers with these statuses, the last one again and again."""
    left = list(statuses)

    async def health(_: web.Request) -> web.Response:
        return web.Response(status=left.pop(0) if len(left) > 1 else left[0], text="no workers")

    async def models(_: web.Request) -> web.Response:
        if needs_key:
            return web.json_response({"error": {"code": "UNAUTHENTICATED"}}, status=401)
        return web.json_response({"data": [{"id": "a"}, {"id": "b"}]})

    app = web.Application()
    app.add_routes([web.get("/health", health), web.get("/v1/models", models)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def test_models_are_returned_once_the_frontend_is_healthy() -> None:
    async def scenario() -> list[str]:
        async with frontend(503, 503, 200) as url:
            return list(await wait_served(url, timeout_s=WAIT_S))

    assert run_async(scenario()) == ["a", "b"]


def test_frontend_whose_clients_need_keys_is_served_with_models_unknown() -> None:
    """A bug: `unbroken up` ended with a KeyError."""

    async def scenario() -> list[str]:
        async with frontend(200, needs_key=True) as url:
            return list(await wait_served(url, timeout_s=WAIT_S))

    assert run_async(scenario()) == []


def test_command_to_try_has_a_key_if_clients_need_one() -> None:
    assert first_request("http://x", ["m"]).startswith("curl -N http://x/v1/chat/completions -H 'content-type")
    assert '"model": "m"' in first_request("http://x", ["m"])
    assert ' -H "authorization: Bearer $KEY" ' in first_request("http://x", [])
    assert first_request("https://x", ["m"], Path("certs")).startswith("curl -N --cacert certs/ca.pem https://x/v1/")


def test_timeout_reports_the_last_answer() -> None:
    async def scenario() -> None:
        async with frontend(503) as url:
            await wait_served(url, timeout_s=0.3)

    with pytest.raises(StartupError, match=r"/health is not 200 after 0\.3 s: status 503: no workers"):
        run_async(scenario())


def test_timeout_reports_a_refused_connection() -> None:
    with pytest.raises(StartupError, match=r"after 0\.2 s: ClientConnectorError"):
        run_async(asyncio.wait_for(wait_served("http://127.0.0.1:1", timeout_s=0.2), WAIT_S))
