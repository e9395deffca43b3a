"""Settings of operators apply at once on a real frontend, and their token is not disclosed."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest

from services.rpc.status import CHANNEL_OPTIONS
from services.stubs import admin_pb2, admin_pb2_grpc
from tests.integration.conftest import Start
from tests.integration.harness.clients.answers import Answer, Refused
from tests.integration.harness.clients.requests import PROTOCOLS, Request
from tests.integration.harness.clients.send import answer, outcome
from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.waiting import until

ENDLESS = 100_000
TOKEN = "the-token-of-the-operators"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
STATUS = 529


@pytest.fixture(scope="module")
def operated(start_plane: Start, tmp_path_factory: pytest.TempPathFactory) -> Plane:
    """A plane with admission control, whose admin API listens on its own ports and needs a token."""
    file: Path = tmp_path_factory.mktemp("secrets") / "token"
    file.write_text(f"{TOKEN}\n")
    plane = start_plane(
        frontend=(
            "--admission-control=token-capacity",
            f"--overload-status-code={STATUS}",
            "--admin-listen=127.0.0.1:0",
            "--admin-grpc-listen=127.0.0.1:0",
            f"--admin-token-file={file}",
        )
    )
    asyncio.run(plane.worker("--mocker-itl-ms=2"))
    return plane


async def set_over_http(plane: Plane, decode: float | None, headers: Any = BEARER) -> int:
    body = {"model": "mocker", "active_decode_blocks_threshold": decode}
    url = f"http://{plane.frontend.ready['admin_http']}/busy_threshold"
    async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as response:
        return response.status


async def set_over_grpc(plane: Plane, decode: float | None, headers: Any = BEARER) -> grpc.StatusCode:
    threshold = admin_pb2.BusyThreshold(model="mocker", active_decode_blocks_threshold=decode)
    request = admin_pb2.SetBusyThresholdRequest(threshold=threshold)
    request.update_mask.paths.append("active_decode_blocks_threshold")
    metadata = [(name.lower(), value) for name, value in headers.items()]
    async with grpc.aio.insecure_channel(plane.frontend.ready["admin_grpc"], options=CHANNEL_OPTIONS) as channel:
        stub: Any = admin_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call,unused-ignore]
        try:
            await stub.SetBusyThreshold(request, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize(("setting", "ok"), [(set_over_http, 200), (set_over_grpc, grpc.StatusCode.OK)])
def test_threshold_applies_from_the_next_request(operated: Plane, setting: Any, ok: Any) -> None:
    async def scenario() -> None:
        rejections = "dynamo_frontend_model_rejection_total"
        before = await operated.frontend.metric(rejections, model="mocker")
        async with asyncio.TaskGroup() as group:
            running = group.create_task(answer(operated.frontend, Request(max_tokens=ENDLESS)))
            used = "dynamo_frontend_worker_active_decode_blocks"
            await until(lambda: is_above_zero(operated, used))
            assert await setting(operated, 0.0) == ok
            refused = [await until(partial(refusal, operated, protocol)) for protocol in PROTOCOLS]
            assert await setting(operated, None) == ok
            answered = [await outcome(operated.frontend, Request(protocol, max_tokens=3)) for protocol in PROTOCOLS]
            running.cancel()

        assert all(isinstance(one, Answer) for one in answered)
        for one in refused:
            assert one.reason == "OVERLOADED"
            assert one.code in (STATUS, "RESOURCE_EXHAUSTED")
        assert await operated.frontend.metric(rejections, model="mocker") == before + len(PROTOCOLS)

    asyncio.run(scenario())


async def refusal(plane: Plane, protocol: Any) -> Refused | None:
    """The refusal of a request; None if it is answered.

    That is right while the worker's report is too old to be believed, as it may be on a busy machine.
    """
    one = await outcome(plane.frontend, Request(protocol, max_tokens=3))
    return one if isinstance(one, Refused) else None


async def is_above_zero(plane: Plane, gauge: str) -> bool:
    return await plane.frontend.metric(gauge) > 0


def test_admin_token_is_never_logged(operated: Plane) -> None:
    async def scenario() -> list[Any]:
        wrong = {"Authorization": "Bearer wrong"}
        return [
            await set_over_http(operated, None),
            await set_over_http(operated, None, wrong),
            await set_over_grpc(operated, None),
            await set_over_grpc(operated, None, wrong),
        ]

    assert asyncio.run(scenario()) == [200, 401, grpc.StatusCode.OK, grpc.StatusCode.UNAUTHENTICATED]
    assert operated.frontend.events_until_now("configuration")
    assert operated.frontend.events_until_now("busy thresholds set")
    assert TOKEN not in operated.frontend.log_until_now()
