"""Whoever does not want an answer any more costs the engine at most two more steps, wherever the request stands.

| workload | nemesis | checker |
| --- | --- | --- |
| an endless request of each kind, in the queue, in prefill or running | its client hangs up | STEPS |
| the same | it is cancelled by its name, over HTTP or gRPC | STEPS, and the client is told |
| the same | its deadline passes | STEPS, and the client is told |

STEPS: the tokens that the worker's engine counts, of prompts and answers, grow by no more than two steps can add once
the frontend has counted the end; all gauges go back to 0; the cause is counted once; the worker is not blamed. Each
kind has a worker of its own, so that the kinds run side by side and are counted apart.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import pytest

from tests.integration.conftest import Start, on_both_engines
from tests.integration.harness.answers import Refused
from tests.integration.harness.asks import Ask
from tests.integration.harness.clients import answer, gathered
from tests.integration.harness.endings import (
    CANCELLATIONS,
    CAUSES,
    KINDS,
    cancel_over_grpc,
    cancel_over_http,
    check_told,
    deadline_s,
    end,
    reading_with,
)
from tests.integration.harness.plane import Frontend, Plane, Process, until
from tests.integration.harness.readings import Reading, read, read_still, wait_load, wait_quiet
from tests.integration.harness.visits import ENDLESS, Visit

pytestmark = on_both_engines

STEP_MS = 80
CHUNK_TOKENS = 10
SLOTS = 2
LIMITS = (f"--engine-request-limit={SLOTS}", "--request-queue-limit=4")
PACE = (f"--mocker-itl-ms={STEP_MS}", f"--mocker-prefill-chunk-tokens={CHUNK_TOKENS}")
LONG = "p" * 10_000
"""A prompt that keeps the engine busy for a thousand steps."""

ENDPOINTS = {True: "chat_completions", False: "completions"}
LATE = "unbroken_engine_tokens_after_cancel_total"


@dataclass(frozen=True)
class Lane:
    """One kind of request, and the worker that has nothing else to do."""

    plane: Plane
    worker: Process
    ask: Ask
    deadline_s: float

    @classmethod
    async def of(cls, plane: Plane, worker: Process, ask: Ask) -> "Lane":
        """With a deadline that is far enough on this machine as it is now."""
        began = time.monotonic()
        await answer(plane.frontend, replace(ask, max_tokens=1))
        return cls(plane, worker, ask, deadline_s(time.monotonic() - began))

    @property
    def frontend(self) -> Frontend:
        return self.plane.frontend

    def visit(self, way: str, **fields: Any) -> Visit:
        """A client of this kind. Its deadline passes if that is the way it ends."""
        timeout_s = self.deadline_s if way == "deadline" else None
        request_id = f"{self.ask.model}-{way}-{fields.get('prompt', '')[:1]}"
        return Visit(self.frontend, replace(self.ask, request_id=request_id, timeout_s=timeout_s, **fields))


@pytest.fixture(scope="module")
def lanes(start_plane: Start) -> list[Lane]:
    plane = start_plane()
    asks = [replace(ask, model=name.replace(" ", "-"), max_tokens=ENDLESS) for name, ask in KINDS.items()]

    async def lane(ask: Ask) -> Lane:
        worker = await plane.worker(f"--served-model-name={ask.model}", *LIMITS, *PACE)
        return await Lane.of(plane, worker, ask)

    async def all_of_them() -> list[Lane]:
        return await gathered(lane(ask) for ask in asks)

    return asyncio.run(all_of_them())


# Where a request stands when it ends


async def running(lane: Lane, way: str, group: asyncio.TaskGroup) -> tuple[Visit, Reading]:
    """It has tokens, as the worker knows, and so has each choice: their prompts fit into one chunk together."""
    before = await read(lane.worker)
    visit = lane.visit(way, prompt="go").start(group)
    return visit, await until(lambda: reading_with(lane.worker, before, attrgetter("told_tokens")))


async def in_prefill(lane: Lane, way: str, group: asyncio.TaskGroup) -> tuple[Visit, Reading]:
    """A part of its prompt is computed."""
    before = await read(lane.worker)
    visit = lane.visit(way, prompt=LONG).start(group)
    return visit, await until(lambda: reading_with(lane.worker, before, attrgetter("prompt_tokens")))


STATES: dict[str, Callable[[Lane, str, asyncio.TaskGroup], Awaitable[tuple[Visit, Reading]]]] = {
    "running": running,
    "prefill": in_prefill,
}


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
            visit, begun = await STATES[state](lane, way, group)
            await end(visit, way)
            await check_counted(lane, way, told)
            ended = await read(lane.worker)  # Until the frontend knows, a busy machine may take any time.
            await wait_load(lane.worker, 0, 0)
            await check_told(visit, way)
        after = await read_still(lane.worker, STEP_MS * 1e-3)
        worth = lane.ask.n if state == "running" else CHUNK_TOKENS
        steps_max = lane.plane.engine.steps_max
        assert after.engine_tokens - ended.engine_tokens <= steps_max * worth, lane.ask
        assert after.sum(LATE) - begun.sum(LATE) <= steps_max * worth

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
            assert after.prompt_tokens == before.prompt_tokens
            assert all(one.ended is None for one in holders)
            for one in holders:
                one.leave()

    asyncio.run(side_by_side(lanes, scenario))


@pytest.mark.parametrize("timeout_s", [0.1, 1.013])
def test_a_deadline_over_grpc_is_no_client_that_left(lanes: list[Lane], timeout_s: float) -> None:
    """The client's own timer may fire first: gRPC rounds what it tells the server up, from a second on."""
    lane = lanes[0]

    async def scenario() -> None:
        told = await read(lane.frontend)
        async with asyncio.TaskGroup() as group:
            visit = Visit(lane.frontend, replace(lane.ask, timeout_s=timeout_s)).start(group)
            assert (await visit.refusal()).is_deadline
        await wait_load(lane.worker, 0, 0)
        await check_counted(lane, "deadline", told)

    asyncio.run(scenario())


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
            reading = await read(lane.worker)
            name = "dynamo_component_cancellation_total"
            from_engine = reading.sum(name, phase="prefill") + reading.sum(name, phase="running")
            assert reading.sum("unbroken_engine_aborts_total") == from_engine > 0

    asyncio.run(scenario())
    assert not frontend.events("worker lost")
    assert not frontend.events(level="error")
    assert not [lane.worker.name for lane in lanes if lane.worker.events(level="error")]


def test_what_a_dead_frontend_asked_for_is_not_worked_on_any_more(lanes: list[Lane]) -> None:
    """Nobody is there to tell the worker: it has to see it for itself."""
    worker = lanes[0].worker
    long, short = replace(lanes[0].ask, prompt=LONG), replace(lanes[0].ask, prompt="go")

    async def scenario(plane: Plane) -> None:
        frontend = plane.start_frontend()
        await until(lambda: frontend.has_found(worker))
        asks = (short, long, short)  # One runs, one is in prefill, one waits.
        async with asyncio.TaskGroup() as group:
            visits = [Visit(frontend, ask).start(group) for ask in asks]
            await wait_load(worker, SLOTS, len(asks) - SLOTS)
            before = await read(worker)
            frontend.kill()
            await wait_load(worker, 0, 0)
        assert {visit.ended.code for visit in visits if isinstance(visit.ended, Refused)} == {"UNAVAILABLE"}
        after = await read_still(worker, STEP_MS * 1e-3)
        steps_max = lanes[0].plane.engine.steps_max
        assert after.engine_tokens - before.engine_tokens <= steps_max * (CHUNK_TOKENS + 1)
        assert await answer(lanes[0].frontend, replace(short, max_tokens=1))

    asyncio.run(scenario(lanes[0].plane))


@pytest.mark.parametrize("way", CAUSES)
def test_a_worker_whose_requests_were_ended_is_not_avoided(start_plane: Start, way: str) -> None:
    """One that failed is left alone for 5 s: then both requests would go to the other worker."""
    plane = start_plane()

    async def scenario() -> None:
        ended = await plane.worker(*PACE)
        lane = await Lane.of(plane, ended, Ask("grpc", max_tokens=ENDLESS))
        async with asyncio.TaskGroup() as group:
            visit, _ = await running(lane, way, group)
            await end(visit, way)
            await wait_load(ended, 0, 0)
            other = await plane.worker(*PACE)
            visits = [Visit(plane.frontend, lane.ask).start(group) for _ in range(2)]
            await gathered(wait_load(worker, 1, 0) for worker in (ended, other))
            for one in visits:
                one.leave()

    asyncio.run(scenario())


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
