"""Whoever does not want an answer any more costs the engine at most two more steps, wherever the request stands.

| workload | nemesis | checker |
| --- | --- | --- |
| an endless request of each kind, in the queue, in prefill, running or on the move | its client hangs up | STEPS |
| the same | it is cancelled by its name, over HTTP or gRPC | STEPS, and the client is told |
| the same | its deadline passes | STEPS, and the client is told |

STEPS: the tokens that the worker's engine counts, of prompts and answers, grow by no more than two steps can add; all
gauges go back to 0; the cause is counted once; the worker is not blamed. Each kind has a worker of its own, so that the
kinds run side by side and are counted apart.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import grpc
import pytest

from services.stubs import inference_pb2, inference_pb2_grpc
from tests.integration.asks import Ask
from tests.integration.clients import answer, gathered
from tests.integration.conftest import Start
from tests.integration.plane import Frontend, Plane, Process, until
from tests.integration.readings import Reading, read, wait_load, wait_quiet
from tests.integration.visits import ENDLESS, Visit

STEP_MS = 80
CHUNK_TOKENS = 10
STEPS_MAX = 2
SLOTS = 2
LIMITS = (f"--engine-request-limit={SLOTS}", "--request-queue-limit=4")
PACE = (f"--mocker-itl-ms={STEP_MS}", f"--mocker-prefill-chunk-tokens={CHUNK_TOKENS}")
DEADLINE_S = 1.2
"""Enough for a request to come into any state on a busy machine."""
LONG = "p" * 10_000
"""A prompt that keeps the engine busy for a thousand steps."""

KINDS = {
    "grpc": Ask("grpc"),
    "completions stream": Ask("stream"),
    "completions unary": Ask("unary"),
    "chat stream": Ask("stream", is_chat=True),
    "chat unary": Ask("unary", is_chat=True),
    "two choices grpc": Ask("grpc", n=2),
    "two choices unary": Ask("unary", n=2),
}
ENDPOINTS = {True: "chat_completions", False: "completions"}
CAUSES = {"leaves": "client_disconnect", "http": "explicit", "rpc": "explicit", "deadline": "deadline"}
PROMPTS, ANSWERS = "unbroken_engine_prefill_tokens_total", "unbroken_engine_generated_tokens_total"
LATE = "unbroken_engine_tokens_after_cancel_total"
CANCELLATIONS = "dynamo_frontend_model_cancellation_total"


@dataclass(frozen=True)
class Lane:
    """One kind of request, and the worker that has nothing else to do."""

    frontend: Frontend
    worker: Process
    ask: Ask

    def visit(self, way: str, **fields: Any) -> Visit:
        """A client of this kind. Its deadline passes if that is the way it ends."""
        timeout_s = DEADLINE_S if way == "deadline" else None
        request_id = f"{self.ask.model}-{way}-{fields.get('prompt', '')[:1]}"
        return Visit(self.frontend, replace(self.ask, request_id=request_id, timeout_s=timeout_s, **fields))


@pytest.fixture(scope="module")
def lanes(start_plane: Start) -> list[Lane]:
    plane = start_plane()
    asks = [replace(ask, model=name.replace(" ", "-"), max_tokens=ENDLESS) for name, ask in KINDS.items()]

    async def lane(ask: Ask) -> Lane:
        worker = await plane.worker(f"--served-model-name={ask.model}", *LIMITS, *PACE)
        return Lane(plane.frontend, worker, ask)

    async def all_of_them() -> list[Lane]:
        return await gathered(lane(ask) for ask in asks)

    return asyncio.run(all_of_them())


# Where a request stands when it ends


async def running(lane: Lane, way: str, group: asyncio.TaskGroup) -> tuple[Visit, Reading]:
    """It has tokens."""
    before = await read(lane.worker)
    visit = lane.visit(way).start(group)
    return visit, await until(lambda: reading_with(lane.worker, before, ANSWERS))


async def in_prefill(lane: Lane, way: str, group: asyncio.TaskGroup) -> tuple[Visit, Reading]:
    """A part of its prompt is computed."""
    before = await read(lane.worker)
    visit = lane.visit(way, prompt=LONG).start(group)
    return visit, await until(lambda: reading_with(lane.worker, before, PROMPTS))


async def reading_with(worker: Process, before: Reading, counter: str) -> Reading | None:
    """What the worker tells, once this counter has grown."""
    after = await read(worker)
    return after if after.sum(counter) > before.sum(counter) else None


STATES: dict[str, Callable[[Lane, str, asyncio.TaskGroup], Awaitable[tuple[Visit, Reading]]]] = {
    "running": running,
    "prefill": in_prefill,
}


# How it ends


async def end(visit: Visit, way: str) -> None:
    """Have it ended in this way."""
    match way:
        case "leaves":
            visit.leave()
        case "http":
            assert await cancel_over_http(visit.frontend, visit.ask.request_id) == 1
        case "rpc":
            assert await cancel_over_grpc(visit.frontend, visit.ask.request_id) == 1
        case "deadline":
            assert (await visit.refusal()).is_deadline


async def cancel_over_http(frontend: Frontend, request_id: str) -> int:
    """How many requests that ended."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{frontend.http}/v1/requests/{request_id}/cancel") as response,
    ):
        assert response.status == 200, await response.text()
        return int((await response.json())["cancelled"])


async def cancel_over_grpc(frontend: Frontend, request_id: str) -> int:
    """The same."""
    async with grpc.aio.insecure_channel(frontend.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        return int((await stub.Cancel(inference_pb2.CancelRequest(request_id=request_id), timeout=5)).cancelled)


async def check_told(visit: Visit, way: str) -> None:
    """One that did not hang up itself gets the reason."""
    if way == "leaves":
        return
    refused = await visit.refusal()
    assert refused.is_deadline if way == "deadline" else refused.reason == "CANCELLED", refused


# What it has cost


def labels_of(ask: Ask, way: str) -> dict[str, str]:
    endpoint = "generate" if ask.protocol == "grpc" else ENDPOINTS[ask.is_chat]
    request_type = "unary" if ask.protocol == "unary" else "stream"
    return {"model": ask.model, "endpoint": endpoint, "request_type": request_type, "cause": CAUSES[way]}


async def check_counted(lane: Lane, way: str, before: Reading) -> None:
    """Once, with its cause, and nothing else of that model."""
    labels = labels_of(lane.ask, way)

    async def is_counted() -> bool:
        reading = await read(lane.frontend)
        return reading.sum(CANCELLATIONS, **labels) == before.sum(CANCELLATIONS, **labels) + 1

    await until(is_counted)
    model = {"model": lane.ask.model}
    assert (await read(lane.frontend)).sum(CANCELLATIONS, **model) == before.sum(CANCELLATIONS, **model) + 1


@pytest.mark.parametrize("way", CAUSES)
@pytest.mark.parametrize("state", STATES)
def test_the_engine_makes_two_more_steps_at_most(lanes: list[Lane], state: str, way: str) -> None:
    async def scenario(lane: Lane) -> None:
        told = await read(lane.frontend)
        async with asyncio.TaskGroup() as group:
            visit, before = await STATES[state](lane, way, group)
            await end(visit, way)
            if way == "deadline":
                before = await read(lane.worker)  # Not from when it was sent: the deadline was far then.
            after = await wait_load(lane.worker, 0, 0)
            await check_told(visit, way)
        worth = lane.ask.n if state == "running" else CHUNK_TOKENS
        assert after.engine_tokens - before.engine_tokens <= STEPS_MAX * worth, lane.ask
        assert after.sum(LATE) - before.sum(LATE) <= STEPS_MAX * worth
        await check_counted(lane, way, told)

    asyncio.run(side_by_side(lanes, scenario))


async def side_by_side(lanes: Sequence[Lane], scenario: Callable[[Lane], Coroutine[Any, Any, None]]) -> None:
    await gathered(scenario(lane) for lane in lanes)
    await wait_quiet(lanes[0].frontend, *(lane.worker for lane in lanes))


@pytest.mark.parametrize("way", CAUSES)
def test_one_that_waits_never_reaches_the_engine(lanes: list[Lane], way: str) -> None:
    async def scenario(lane: Lane) -> None:
        told = await read(lane.frontend)
        async with asyncio.TaskGroup() as group:
            holder = Ask("grpc", model=lane.ask.model, max_tokens=ENDLESS)
            holders = [Visit(lane.frontend, holder).start(group) for _ in range(SLOTS)]
            await until(lambda: all(one.has_begun for one in holders))
            before = await read(lane.worker)
            visit = lane.visit(way).start(group)
            await wait_load(lane.worker, SLOTS, lane.ask.n)
            await end(visit, way)
            after = await wait_load(lane.worker, SLOTS, 0)
            await check_told(visit, way)
            await check_counted(lane, way, told)
            assert after.sum(PROMPTS) == before.sum(PROMPTS)
            assert all(one.ended is None for one in holders)
            for one in holders:
                one.leave()

    asyncio.run(side_by_side(lanes, scenario))


def test_signals_that_were_sent_have_arrived_and_no_worker_is_to_blame(lanes: list[Lane]) -> None:
    """After all the endings above."""
    frontend = lanes[0].frontend

    async def signals() -> tuple[float, float]:
        sent = (await read(frontend)).sum("dynamo_frontend_cancel_signals_total")
        workers = [await read(lane.worker) for lane in lanes]
        return sent, sum(one.sum("dynamo_component_cancellation_total", cause="signal") for one in workers)

    async def scenario() -> None:
        async def are_equal() -> bool:
            sent, arrived = await signals()
            return sent == arrived > 0

        await until(are_equal)
        for lane in lanes:
            assert await answer(frontend, replace(lane.ask, max_tokens=1))

    asyncio.run(scenario())
    assert not frontend.events("worker lost")
    assert not frontend.events(level="error")
    assert not [lane.worker.name for lane in lanes if lane.worker.events(level="error")]


def test_to_cancel_twice_or_what_is_not_there_harms_nobody(lanes: list[Lane]) -> None:
    lane = lanes[0]

    async def scenario() -> None:
        async with asyncio.TaskGroup() as group:
            victim = Visit(lane.frontend, replace(lane.ask, request_id="victim")).start(group)
            other = Visit(lane.frontend, replace(lane.ask, request_id="victim-2")).start(group)
            await until(lambda: victim.has_begun and other.has_begun)
            assert await cancel_over_http(lane.frontend, "nobody") == 0
            assert await cancel_over_grpc(lane.frontend, "victi") == 0
            assert await cancel_over_http(lane.frontend, "victim") == 1
            assert (await victim.refusal()).reason == "CANCELLED"
            assert await cancel_over_http(lane.frontend, "victim") == 0
            assert await cancel_over_grpc(lane.frontend, "victim") == 0
            await wait_load(lane.worker, 1, 0)
            assert other.ended is None
            other.leave()
        await wait_quiet(lane.frontend, lane.worker)

    asyncio.run(scenario())


# On the move


@pytest.mark.parametrize("way", CAUSES)
def test_one_on_the_move_begins_nowhere_any_more(start_plane: Start, way: str) -> None:
    """Its worker is killed and there is no other, until it has ended; the next worker never hears of it."""
    plane = start_plane()
    asks = [replace(ask, max_tokens=ENDLESS) for ask in KINDS.values()]

    async def scenario() -> None:
        victim = await plane.worker("--mocker-itl-ms=5", "--migration-limit=3")
        async with asyncio.TaskGroup() as group:
            visits = start_all(plane, asks, way, group)
            await wait_load(victim, sum(ask.n for ask in asks), 0)
            victim.kill()
            await until(lambda: plane.frontend.events("worker lost"))
            await gathered(end(visit, way) for visit in visits)
            for visit in visits:
                await check_told(visit, way)
        await wait_quiet(plane.frontend)
        heir = await plane.worker()
        await answer(plane.frontend, Ask("grpc", prompt="next", max_tokens=3))
        assert (await read(heir)).engine_tokens == len("next") + 3
        cause = {"cause": CAUSES[way]}
        assert (await read(plane.frontend)).sum(CANCELLATIONS, **cause) == len(asks)
        assert not plane.frontend.events(level="error")

    asyncio.run(scenario())


def start_all(plane: Plane, asks: Sequence[Ask], way: str, group: asyncio.TaskGroup) -> list[Visit]:
    timeout_s = DEADLINE_S if way == "deadline" else None
    named = [ask.named(f"moving-{number}", timeout_s=timeout_s) for number, ask in enumerate(asks)]
    return [Visit(plane.frontend, ask).start(group) for ask in named]


@pytest.mark.parametrize("way", CAUSES)
def test_one_that_has_moved_and_is_in_prefill_again_stops_like_any_other(start_plane: Start, way: str) -> None:
    plane = start_plane()
    asks = [replace(ask, max_tokens=ENDLESS, prompt=LONG) for ask in KINDS.values()]

    async def scenario() -> None:
        victim = await plane.worker("--mocker-itl-ms=5", "--mocker-prefill-chunk-tokens=1000000")
        async with asyncio.TaskGroup() as group:
            visits = start_all(plane, asks, way, group)
            await wait_load(victim, sum(ask.n for ask in asks), 0)
            heir = await plane.worker(*PACE)
            victim.kill()
            nothing = await read(heir)
            await until(lambda: reading_with(heir, nothing, PROMPTS))
            await wait_load(heir, sum(ask.n for ask in asks), 0)
            before = await read(heir)
            await gathered(end(visit, way) for visit in visits)
            if way == "deadline":
                before = await read(heir)
            after = await wait_load(heir, 0, 0)
            for visit in visits:
                await check_told(visit, way)
        assert after.engine_tokens - before.engine_tokens <= STEPS_MAX * CHUNK_TOKENS
        await wait_quiet(heir, plane.frontend)
        assert not plane.frontend.events(level="error")

    asyncio.run(scenario())
