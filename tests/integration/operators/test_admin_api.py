"""Operators read and set thresholds over HTTP and gRPC, if they are allowed to and the values make sense.

The effect of thresholds is tested in test_busy_threshold.py.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
import pytest

from services.stubs import admin_pb2, admin_pb2_grpc
from tests.integration.conftest import Start
from tests.integration.harness.clients.admin import (
    DECODE,
    PREFILL,
    get_thresholds,
    grpc_code,
    grpc_set,
    http_status,
    post_threshold,
    set_thresholds,
)
from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.plane.processes import Frontend
from tests.integration.harness.waiting import until
from tests.support.clock import WAIT_S

ADMISSION = "--admission-control=token-capacity"


@pytest.fixture(scope="module")
def plane(start_plane: Start) -> Plane:
    """A plane with a worker of the model `mocker`."""
    plane = start_plane(frontend=(ADMISSION,))
    asyncio.run(plane.worker())
    return plane


async def another_frontend(plane: Plane, *options: str) -> Frontend:
    """Start another frontend with these options that serves the same model."""
    frontend = plane.start_frontend(ADMISSION, *options)
    await until(lambda: frontend.events("worker found"))
    return frontend


STEPS: Sequence[tuple[Mapping[str, float | None], float | None, int | None]] = [
    ({}, None, 1000),
    ({DECODE: 0.75}, 0.75, 1000),
    ({PREFILL: 5}, 0.75, 5),
    ({DECODE: 0, PREFILL: 0}, 0, 0),
    ({DECODE: 1}, 1, 0),
    ({PREFILL: None}, 1, None),
]
"""What is requested, and the thresholds that apply afterwards."""


def test_thresholds_are_listed_read_and_set_one_by_one(start_plane: Start) -> None:
    plane = start_plane(frontend=(ADMISSION, "--active-prefill-tokens-threshold=1000"))

    async def scenario() -> None:
        frontend = plane.frontend
        await plane.worker()
        assert await get_thresholds(frontend) == {"mocker": {DECODE: None, PREFILL: 1000}}
        same = {"model": "mocker", "admission_control": "token-capacity"}
        for asked, decode, prefill in STEPS:
            listed_threshold = await post_threshold(frontend, {"model": "mocker", **asked})
            assert listed_threshold == same | {DECODE: decode, PREFILL: prefill}
        assert await get_thresholds(frontend) == {"mocker": {DECODE: 1, PREFILL: None}}
        await post_threshold(frontend, {"model": "mocker", DECODE: None})
        await plane.worker("--served-model-name=another")
        assert await get_thresholds(frontend) == {
            "another": {DECODE: None, PREFILL: 1000},
            "mocker": {DECODE: None, PREFILL: None},
        }

    asyncio.run(scenario())


BAD_BODIES: Mapping[str, Any] = {
    "not JSON": "{",
    "not a number": '{"model": "mocker", "active_decode_blocks_threshold": NaN}',
    "infinite": '{"model": "mocker", "active_decode_blocks_threshold": Infinity}',
    "too large for a number": '{"model": "mocker", "active_decode_blocks_threshold": 1e999}',
    "above 1": {"model": "mocker", DECODE: 1.01},
    "below 0": {"model": "mocker", DECODE: -0.01},
    "text": {"model": "mocker", DECODE: "0.5"},
    "true": {"model": "mocker", DECODE: True},
    "below 0 tokens": {"model": "mocker", PREFILL: -1},
    "half a token": {"model": "mocker", PREFILL: 0.5},
    "above 64 bits": {"model": "mocker", PREFILL: 2**64},
    "one valid, one invalid": {"model": "mocker", DECODE: 0.5, PREFILL: -1},
    "no model": {DECODE: 0.5},
    "a list": [],
    "an unknown field": {"model": "mocker", "active_decode_block_threshold": 0.5},
}


def test_bad_thresholds_are_refused_and_change_nothing(plane: Plane) -> None:
    async def scenario() -> None:
        await set_thresholds(plane.frontend, 0.25, 25)
        for body in BAD_BODIES.values():
            refused = await post_threshold(plane.frontend, body, status=400)
            assert refused["error"]["type"] == "invalid_request_error"
        assert (await get_thresholds(plane.frontend))["mocker"] == {DECODE: 0.25, PREFILL: 25}
        unknown = await post_threshold(plane.frontend, {"model": "nobody", DECODE: 0.5}, status=404)
        assert unknown["error"]["code"] == "MODEL_NOT_FOUND"
        assert "nobody" not in await get_thresholds(plane.frontend)
        await set_thresholds(plane.frontend, None, None)

    asyncio.run(scenario())


def test_thresholds_are_set_over_grpc(plane: Plane) -> None:
    async def scenario() -> None:
        address = plane.frontend.grpc
        both = await grpc_set(address, 0.25, 25, DECODE, PREFILL)
        assert (both.active_decode_blocks_threshold, both.active_prefill_tokens_threshold) == (0.25, 25)
        one = await grpc_set(address, 0.5, None, DECODE)
        assert (one.active_decode_blocks_threshold, one.active_prefill_tokens_threshold) == (0.5, 25)
        off = await grpc_set(address, None, None, DECODE)
        assert not off.HasField(DECODE)
        assert (await get_thresholds(plane.frontend))["mocker"] == {DECODE: None, PREFILL: 25}
        async with grpc.aio.insecure_channel(address) as channel:
            listed = await admin_pb2_grpc.AdminStub(channel).ListBusyThresholds(
                admin_pb2.ListBusyThresholdsRequest(), timeout=WAIT_S
            )
        assert {one.model: one.active_prefill_tokens_threshold for one in listed.thresholds}["mocker"] == 25
        assert await grpc_code(address) == "INVALID_ARGUMENT"
        assert await grpc_code(address, "no_such_field") == "INVALID_ARGUMENT"
        assert await grpc_code(address, DECODE, decode=1.5) == "INVALID_ARGUMENT"
        await set_thresholds(plane.frontend, None, None)

    asyncio.run(scenario())


def test_disabled_admin_api_is_not_found(plane: Plane) -> None:
    async def scenario() -> None:
        frontend = await another_frontend(plane, "--disable-admin-api")
        assert await http_status(frontend.http) == 404
        assert await grpc_code(frontend.grpc, DECODE) == "UNIMPLEMENTED"
        assert await http_status(frontend.http, path="/live") == 200
        frontend.kill()

    asyncio.run(scenario())


def test_admin_calls_need_the_admin_token(plane: Plane) -> None:
    async def scenario() -> None:
        frontend = await another_frontend(plane, "--admin-token=sesame")
        assert [await http_status(frontend.http, token) for token in ("", "wrong", "sesame")] == [401, 401, 200]
        codes = [await grpc_code(frontend.grpc, DECODE, token=token) for token in ("", "wrong", "sesame")]
        assert codes == ["UNAUTHENTICATED", "UNAUTHENTICATED", "OK"]
        assert await http_status(frontend.http, path="/v1/models") == 200
        frontend.kill()

    asyncio.run(scenario())


def test_admin_api_can_listen_on_its_own_ports(plane: Plane) -> None:
    options = ("--admin-listen=127.0.0.1:0", "--admin-grpc-listen=127.0.0.1:0")

    async def scenario() -> None:
        frontend = await another_frontend(plane, *options)
        apart, apart_grpc = f"http://{frontend.ready['admin_http']}", frontend.ready["admin_grpc"]
        assert await http_status(frontend.http) == 404
        assert await http_status(apart) == 200
        other_paths = ("/live", "/health", "/metrics", "/openapi.json")
        assert [await http_status(apart, path=path) for path in other_paths] == [200] * 4
        assert await http_status(apart, path="/v1/models") == 404
        assert await grpc_code(frontend.grpc, DECODE) == "UNIMPLEMENTED"
        assert await grpc_code(apart_grpc, DECODE) == "OK"
        frontend.kill()

    asyncio.run(scenario())
