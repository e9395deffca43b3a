"""A request that is cancelled by its name ends wherever it is, costs the engine nothing more, and is counted once.

| workload | nemesis | checker |
| --- | --- | --- |
| one request: queued, in prefill, running, without a worker | cancelled over HTTP or gRPC | CANCELLED, gauges 0 |
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import grpc
import pytest

from services.rpc import CHANNEL_OPTIONS
from services.stubs import inference_pb2, inference_pb2_grpc
from tests.integration.answers import Answer, Refused
from tests.integration.asks import PROTOCOLS, Ask, request
from tests.integration.clients import answer, outcome
from tests.integration.conftest import Start
from tests.integration.plane import Frontend, Plane, Process, until

ENDLESS = 100_000
NAME = "the-one"
CHOICES = 3
PREFILL_S_PER_TOKEN = 1
Cancel = Callable[[Frontend, str], Awaitable[int]]


async def over_http(frontend: Frontend, name: str) -> int:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{frontend.http}/v1/requests/{name}/cancel") as response,
    ):
        cancelled: int = (await response.json())["cancelled"]
        return cancelled


async def over_grpc(frontend: Frontend, name: str) -> int:
    async with grpc.aio.insecure_channel(frontend.grpc, options=CHANNEL_OPTIONS) as channel:
        answer_ = await inference_pb2_grpc.InferenceStub(channel).Cancel(inference_pb2.CancelRequest(request_id=name))
        return answer_.cancelled


async def has(process: Process, gauge: str, value: int) -> bool:
    return await process.metric(gauge) == value


@asynccontextmanager
async def counted_once(plane: Plane) -> AsyncIterator[None]:
    """What happens inside is one cancellation by name, and nothing is left of it."""

    async def counts() -> list[float]:
        name = "dynamo_frontend_model_cancellation_total"
        return [await plane.frontend.metric(name, cause="explicit"), await plane.frontend.metric(name)]

    before = await counts()
    yield
    await until(lambda: has(plane.frontend, "dynamo_frontend_inflight_requests", 0))
    assert [after - earlier for after, earlier in zip(await counts(), before, strict=True)] == [1, 1]


async def check_cancelled(plane: Plane, asking: "asyncio.Task[Answer | Refused]", cancel: Cancel) -> None:
    """Cancel it, again and again: it ends with the reason."""
    assert await cancel(plane.frontend, "another") == 0
    assert await cancel(plane.frontend, NAME) == 1
    refused = await asking
    assert isinstance(refused, Refused)
    assert refused.reason == "CANCELLED"
    assert await cancel(plane.frontend, NAME) == 0


@pytest.fixture(scope="module")
def narrow(start_plane: Start) -> tuple[Plane, Process]:
    """A plane whose only worker runs CHOICES requests at a time, and computes prompts very slowly."""
    plane = start_plane()
    prefill = f"--mocker-prefill-us-per-token={PREFILL_S_PER_TOKEN * 1_000_000}"
    options = (f"--engine-request-limit={CHOICES}", "--mocker-itl-ms=2", prefill, "--mocker-prefill-chunk-tokens=1")
    return plane, asyncio.run(plane.worker(*options))


@pytest.fixture(scope="module")
def quick(start_plane: Start) -> tuple[Plane, Process]:
    plane = start_plane()
    return plane, asyncio.run(plane.worker(f"--engine-request-limit={CHOICES}", "--mocker-itl-ms=2"))


@pytest.mark.parametrize("choices", [1, CHOICES])
@pytest.mark.parametrize("cancel", [over_http, over_grpc])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_one_that_runs(quick: tuple[Plane, Process], protocol: str, cancel: Cancel, choices: int) -> None:
    plane, worker = quick

    async def scenario() -> None:
        async with counted_once(plane), asyncio.TaskGroup() as group:
            ask = Ask(protocol, max_tokens=ENDLESS, n=choices, request_id=NAME)
            asking = group.create_task(outcome(plane.frontend, ask))
            await until(lambda: has(worker, "dynamo_engine_request", choices))
            await check_cancelled(plane, asking, cancel)
            await until(lambda: has(worker, "dynamo_engine_request", 0))

    asyncio.run(scenario())


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_one_whose_prompt_is_being_computed(narrow: tuple[Plane, Process], protocol: str) -> None:
    plane, worker = narrow

    async def scenario() -> None:
        async with counted_once(plane), asyncio.TaskGroup() as group:
            ask = Ask(protocol, max_tokens=ENDLESS, prompt="x" * 1000, request_id=NAME)
            asking = group.create_task(outcome(plane.frontend, ask))
            await until(lambda: has(worker, "dynamo_engine_request", 1))
            await check_cancelled(plane, asking, over_http)
            await until(lambda: has(worker, "dynamo_engine_request", 0))

    asyncio.run(scenario())


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_one_in_the_queue_harms_no_other(quick: tuple[Plane, Process], protocol: str) -> None:
    plane, worker = quick

    async def scenario() -> None:
        async with asyncio.TaskGroup() as group:
            before = Ask(max_tokens=ENDLESS, n=CHOICES, request_id="before")
            running = group.create_task(answer(plane.frontend, before))
            await until(lambda: has(worker, "dynamo_engine_request", CHOICES))
            queued = group.create_task(outcome(plane.frontend, Ask(protocol, max_tokens=ENDLESS, request_id=NAME)))
            await until(lambda: has(worker, "dynamo_request_queue", 1))
            await check_cancelled(plane, queued, over_http)
            await until(lambda: has(worker, "dynamo_request_queue", 0))
            assert await has(worker, "dynamo_engine_request", CHOICES)
            running.cancel()
        await until(lambda: has(worker, "dynamo_engine_request", 0))

    asyncio.run(scenario())


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_one_that_has_lost_its_worker_is_not_begun_elsewhere(start_plane: Start, protocol: str) -> None:
    plane = start_plane()

    async def scenario() -> None:
        worker = await plane.worker("--mocker-itl-ms=2")
        async with counted_once(plane), asyncio.TaskGroup() as group:
            asking = group.create_task(outcome(plane.frontend, Ask(protocol, max_tokens=ENDLESS, request_id=NAME)))
            await until(lambda: has(worker, "dynamo_engine_request", 1))
            worker.kill()
            await until(lambda: plane.frontend.events("worker lost"))
            await check_cancelled(plane, asking, over_http)
        after = await plane.worker()
        assert await has(after, "dynamo_engine_request", 0)
        assert await after.metric("unbroken_engine_steps_total") == 0
        assert not plane.frontend.moves(NAME)

    asyncio.run(scenario())


async def read_to_the_end(call: Any) -> None:
    while await call.read():
        pass


@pytest.mark.parametrize("timeout_s", [0.1, 1.013])
def test_a_deadline_over_grpc_is_no_client_that_left(quick: tuple[Plane, Process], timeout_s: float) -> None:
    """The client's own timer may fire first: gRPC rounds what it tells the server up, from a second on."""
    plane, worker = quick
    name = "dynamo_frontend_model_cancellation_total"

    async def scenario() -> None:
        before = [await plane.frontend.metric(name, cause="deadline"), await plane.frontend.metric(name)]
        ask = request(Ask(max_tokens=ENDLESS))
        async with grpc.aio.insecure_channel(plane.frontend.grpc, options=CHANNEL_OPTIONS) as channel:
            call = inference_pb2_grpc.InferenceStub(channel).Generate(ask, timeout=timeout_s)
            with pytest.raises(grpc.aio.AioRpcError, match="DEADLINE_EXCEEDED"):
                await read_to_the_end(call)
        await until(lambda: has(worker, "dynamo_engine_request", 0))
        await until(lambda: has(plane.frontend, "dynamo_frontend_inflight_requests", 0))
        after = [await plane.frontend.metric(name, cause="deadline"), await plane.frontend.metric(name)]
        assert after == [before[0] + 1, before[1] + 1]

    asyncio.run(scenario())
