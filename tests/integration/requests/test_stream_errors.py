"""A request that fails tells its client why, in mid-stream as well, and never looks like a complete answer."""

import asyncio
import re
import time

import aiohttp
import grpc
import pytest

from services.stubs import inference_pb2, inference_pb2_grpc
from tests.integration.conftest import Start
from tests.integration.harness.clients.answers import Refused
from tests.integration.harness.clients.cancellations import deadline_s
from tests.integration.harness.clients.client import ENDLESS
from tests.integration.harness.clients.requests import Request, headers_of, json_body, path_of
from tests.integration.harness.clients.send import answer, outcome
from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.plane.processes import Frontend
from tests.support.clock import WAIT_S

ITL = "--mocker-itl-ms=5"


async def refused(plane: Plane, request: Request) -> Refused:
    """Send a request that must be refused; return the refusal."""
    got = await outcome(plane.frontend, request)
    assert isinstance(got, Refused), got
    return got


async def stream_body(frontend: Frontend, request: Request, begun: asyncio.Event | None = None) -> str:
    """Return the body of a streamed answer. `begun` is set once its first bytes have arrived."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"{frontend.http}{path_of(request)}", json=json_body(request), headers=headers_of(request)
        ) as response,
    ):
        assert response.status == 200
        first = await response.content.readany()
        if begun is not None:
            begun.set()
        return (first + await response.content.read()).decode()


@pytest.mark.parametrize(("protocol", "code"), [("unary", 502), ("stream", 200), ("grpc", "UNAVAILABLE")])
def test_request_that_cannot_continue_fails_with_a_reason_and_is_retryable(
    start_plane: Start, protocol: str, code: int | str
) -> None:
    plane = start_plane(frontend=("--replacement-wait=0.2",))

    async def scenario() -> None:
        await plane.worker(ITL, "--mocker-fault=die_after=5")
        got = await refused(plane, Request(protocol))

        assert (got.code, got.reason) == (code, "DISCONNECTED")
        assert got.error["retryable"] in (True, "true")

    asyncio.run(scenario())


def test_deadline_that_passes_mid_stream_is_reported(start_plane: Start) -> None:
    plane = start_plane()

    async def scenario() -> None:
        await plane.worker(ITL)
        began = time.monotonic()
        await answer(plane.frontend, Request("stream", max_tokens=1))
        timeout_s = deadline_s(time.monotonic() - began, least_s=1.5)
        request = Request("stream", max_tokens=100_000, timeout_s=timeout_s)

        assert (await refused(plane, request)).reason == "DEADLINE_EXCEEDED"
        assert "[DONE]" not in await stream_body(plane.frontend, request)

    asyncio.run(scenario())


@pytest.mark.parametrize(("fault", "reason"), [("raise_after", "ENGINE_ERROR"), ("die_after", "DISCONNECTED")])
def test_error_mid_stream_has_its_own_reason_and_is_not_followed_by_done(
    start_plane: Start, fault: str, reason: str
) -> None:
    plane = start_plane(frontend=("--migration-limit=0",))

    async def scenario() -> None:
        await plane.worker(ITL, f"--mocker-fault={fault}=5", "--mocker-fault=linger_ms=500")
        text = await stream_body(plane.frontend, Request("stream"))

        assert text.count("event: error\n") == 1
        assert f'"code":"{reason}"' in text
        assert '"retryable":true' in text
        assert "[DONE]" not in text

    asyncio.run(scenario())


@pytest.mark.parametrize("is_chat", [False, True])
def test_cancelled_stream_does_not_look_complete(start_plane: Start, is_chat: bool) -> None:
    plane = start_plane()

    async def scenario() -> str:
        await plane.worker(ITL)
        request = Request("stream", is_chat=is_chat, max_tokens=ENDLESS, request_id="unwanted")
        async with asyncio.TaskGroup() as group:
            begun = asyncio.Event()
            body = group.create_task(stream_body(plane.frontend, request, begun))
            await begun.wait()
            async with grpc.aio.insecure_channel(plane.frontend.grpc) as channel:
                stub = inference_pb2_grpc.InferenceStub(channel)
                await stub.Cancel(inference_pb2.CancelRequest(request_id="unwanted"), timeout=WAIT_S)
        return body.result()

    text = asyncio.run(scenario())
    assert '"code":"CANCELLED"' in text
    assert "[DONE]" not in text
    assert not re.search(r'"finish_reason":"', text)
