"""A frontend that no registry has answered yet says so, and lets its clients try again.

| workload | nemesis | checker |
| --- | --- | --- |
| requests over all protocols, models, health, thresholds | a registry that is away, or frozen | 503, NO_WORKERS |
| the same requests | the registry comes back | answers; a made-up name is 404 from now on |
"""

import asyncio
import signal
from typing import Any

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.rpc.status import CHANNEL_OPTIONS
from tests.integration.conftest import Start
from tests.integration.harness.clients.requests import PROTOCOLS, Request
from tests.integration.harness.clients.send import is_answered, refusal
from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.plane.processes import Frontend
from tests.integration.harness.waiting import until

PATHS = ("/health", "/v1/models", "/v1/models/mocker")


@pytest.mark.parametrize("fault", ["away", "frozen"])
def test_no_model_is_called_unknown_before_a_registry_has_answered(start_plane: Start, fault: str) -> None:
    plane = start_plane()
    plane.registry.signal(signal.SIGSTOP if fault == "frozen" else signal.SIGKILL)

    asyncio.run(check_restarted_frontend(plane, fault))


async def check_restarted_frontend(plane: Plane, fault: str) -> None:
    frontend = await asyncio.to_thread(plane.start_frontend)
    for protocol in PROTOCOLS:
        refused = await refusal(frontend, Request(protocol))
        assert refused is not None
        assert (refused.error["code"], refused.code in (503, "UNAVAILABLE")) == ("NO_WORKERS", True)
        assert "no registry has answered" in refused.error["message"]
    for path in PATHS:
        status, body = await get(frontend, path)
        assert (status, body["error"]["code"]) == (503, "NO_WORKERS"), path
        assert "no registry has answered" in body["error"]["message"], path
    assert await set_threshold(frontend) == 503
    assert await grpc_health(frontend) == "NOT_SERVING"

    if fault == "frozen":
        plane.registry.signal(signal.SIGCONT)
    else:
        plane.restart_registry()
    worker = await plane.worker()
    for protocol in PROTOCOLS:
        await until(lambda: is_answered(frontend, Request(protocol)))  # noqa: B023 (awaited in the same round)
    status, body = await get(frontend, "/v1/models/made-up")
    assert (status, body["error"]["code"]) == (404, "MODEL_NOT_FOUND")
    assert (await get(frontend, "/v1/models/mocker"))[0] == 200
    worker.kill()
    await until(lambda: is_away(frontend, "/v1/models/mocker"))


async def is_away(frontend: Frontend, path: str) -> bool:
    status, body = await get(frontend, path)
    return status == 503 and body["error"]["code"] == "NO_WORKERS"


def test_no_model_is_called_unknown_while_no_worker_has_registered(start_plane: Start) -> None:
    frontend = start_plane().frontend

    async def test() -> None:
        refused = await until(lambda: refusal_naming(frontend, "no worker has registered yet"))
        assert refused.error["code"] == "NO_WORKERS"

    asyncio.run(test())


async def refusal_naming(frontend: Frontend, words: str) -> Any:
    refused = await refusal(frontend, Request())
    assert refused is not None
    return refused if words in refused.error["message"] else None


async def get(frontend: Frontend, path: str) -> tuple[int, Any]:
    async with aiohttp.ClientSession(frontend.http) as session, session.get(path) as response:
        return response.status, await response.json()


async def set_threshold(frontend: Frontend) -> int:
    body = {"model": "mocker", "active_decode_blocks_threshold": 0.5}
    async with aiohttp.ClientSession(frontend.http) as session, session.post("/busy_threshold", json=body) as response:
        return response.status


async def grpc_health(frontend: Frontend) -> str:
    async with grpc.aio.insecure_channel(frontend.grpc, options=CHANNEL_OPTIONS) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return name
