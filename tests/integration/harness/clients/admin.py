"""Calls of a frontend's admin API, over HTTP and gRPC."""

from typing import Any

import aiohttp
import grpc

from services.stubs import admin_pb2, admin_pb2_grpc
from tests.integration.harness.plane.processes import Frontend
from tests.support.clock import WAIT_S

DECODE, PREFILL = "active_decode_blocks_threshold", "active_prefill_tokens_threshold"


async def get_thresholds(frontend: Frontend) -> Any:
    """Return all thresholds, by model."""
    async with aiohttp.ClientSession() as session, session.get(f"{frontend.http}/busy_threshold") as response:
        assert response.status == 200
        listed = await response.json()
    assert listed["admission_control"] == "token-capacity"
    return {one.pop("model"): one for one in listed["thresholds"]}


async def post_threshold(frontend: Frontend, body: Any, *, status: int = 200, **fields: str) -> Any:
    """Post a body and return the response's body. A body that is not a string is sent as JSON."""
    content = {"data": body} if isinstance(body, str) else {"json": body}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{frontend.http}/busy_threshold", headers=fields, **content) as response,
    ):
        assert response.status == status, await response.text()
        return await response.json()


async def set_thresholds(frontend: Frontend, decode: float | None, prefill: int | None, model: str = "mocker") -> None:
    await post_threshold(frontend, {"model": model, DECODE: decode, PREFILL: prefill})


async def http_status(address: str, token: str = "", path: str = "/busy_threshold") -> int:
    given = {"Authorization": f"Bearer {token}"} if token else {}
    async with aiohttp.ClientSession() as session, session.get(f"{address}{path}", headers=given) as response:
        return response.status


async def grpc_set(address: str, decode: float | None, prefill: int | None, *paths: str, token: str = "") -> Any:
    """Call SetBusyThreshold for the mocker; return its thresholds afterwards. Raises AioRpcError."""
    message = admin_pb2.SetBusyThresholdRequest()
    message.threshold.model = "mocker"
    if decode is not None:
        message.threshold.active_decode_blocks_threshold = decode
    if prefill is not None:
        message.threshold.active_prefill_tokens_threshold = prefill
    message.update_mask.paths.extend(paths)
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    async with grpc.aio.insecure_channel(address) as channel:
        stub = admin_pb2_grpc.AdminStub(channel)
        return (await stub.SetBusyThreshold(message, timeout=WAIT_S, metadata=metadata)).threshold


async def grpc_code(address: str, *paths: str, decode: float | None = None, token: str = "") -> str:
    try:
        await grpc_set(address, decode, None, *paths, token=token)
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return "OK"
