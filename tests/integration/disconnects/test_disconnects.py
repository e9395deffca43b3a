"""A request that is cancelled costs the engine at most two more steps, in whatever state it is.

| workload | nemesis | checker |
| --- | --- | --- |
| an endless request of each kind, in the queue, in prefill or running | its client hangs up | STEPS |
| the same | it is cancelled by request id, over HTTP or gRPC | STEPS, and the client is told |
| the same | its deadline passes | STEPS, and the client is told |

STEPS: once the frontend has counted the end, the prompt and answer tokens that the worker's engine counts grow by at
most two steps' worth; all gauges return to 0; the cause is counted once; the worker is not blamed. Each kind has a
worker of its own, so that the kinds run side by side and are counted separately.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import pytest

from tests.integration.conftest import Start, on_both_engines
from tests.integration.harness.clients.answers import Refused
from tests.integration.harness.clients.cancellations import (
    CANCELLATIONS,
    CAUSES,
    KINDS,
    cancel_over_grpc,
    cancel_over_http,
    check_client_error,
    count_cancellations,
    deadline_s,
    end_request,
    metrics_if_grown,
)
from tests.integration.harness.clients.client import ENDLESS, Client
from tests.integration.harness.clients.requests import Request
from tests.integration.harness.clients.send import answer, run_together
from tests.integration.harness.metrics import Metrics, read_metrics, read_metrics_at_rest, wait_idle, wait_load
from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.plane.processes import Frontend, Process
from tests.integration.harness.waiting import until

pytestmark = on_both_engines

STEP_MS = 80
CHUNK_TOKENS = 10
SLOTS = 2
LIMITS = (f"--engine-request-limit={SLOTS}", "--request-queue-limit=4")
PACE = (f"--mocker-itl-ms={STEP_MS}", f"--mocker-prefill-chunk-tokens={CHUNK_TOKENS}")
LONG = "p" * 10_000
"""A prompt that takes the engine a thousand steps."""

ENDPOINTS = {True: "chat_completions", False: "completions"}
LATE = "unbroken_engine_tokens_after_cancel_total"


@dataclass(frozen=True)
class Lane:
    """One kind of request, with a worker of its own."""

    plane: Plane
    worker: Process
    request: Request
    deadline_s: float

    @classmethod
    async def of(cls, plane: Plane, worker: Process, request: Request) -> "Lane":
        """Measure a short request, to choose a deadline that this machine can meet now."""
        began = time.monotonic()
        await answer(plane.frontend, replace(request, max_tokens=1))
        return cls(plane, worker, request, deadline_s(time.monotonic() - began))

    @property
    def frontend(self) -> Frontend:
        return self.plane.frontend

    def client(self, ending: str, **fields: Any) -> Client:
        """Return a client for this kind of request, with a deadline if that is how it ends."""
        timeout_s = self.deadline_s if ending == "deadline" else None
        request_id = f"{self.request.model}-{ending}-{fields.get('prompt', '')[:1]}"
        return Client(self.frontend, replace(self.request, request_id=request_id, timeout_s=timeout_s, **fields))


@pytest.fixture(scope="module")
def lanes(start_plane: Start) -> list[Lane]:
    plane = start_plane()
    requests = [replace(request, model=name.replace(" ", "-"), max_tokens=ENDLESS) for name, request in KINDS.items()]

    async def lane(request: Request) -> Lane:
        worker = await plane.worker(f"--served-model-name={request.model}", *LIMITS, *PACE)
        return await Lane.of(plane, worker, request)

    async def all_of_them() -> list[Lane]:
        return await run_together(lane(request) for request in requests)

    return asyncio.run(all_of_them())


# The request's state when it ends


async def running(lane: Lane, ending: str, group: asyncio.TaskGroup) -> tuple[Client, Metrics]:
    """Wait until the worker reports tokens. Every choice has some: their prompts fit into one chunk together."""
    before = await read_metrics(lane.worker)
    client = lane.client(ending, prompt="go").start(group)
    return client, await until(lambda: metrics_if_grown(lane.worker, before, attrgetter("generated_tokens")))


async def in_prefill(lane: Lane, ending: str, group: asyncio.TaskGroup) -> tuple[Client, Metrics]:
    """Wait until a part of the prompt has been computed."""
    before = await read_metrics(lane.worker)
    client = lane.client(ending, prompt=LONG).start(group)
    return client, await until(lambda: metrics_if_grown(lane.worker, before, attrgetter("prompt_tokens")))


STATES: dict[str, Callable[[Lane, str, asyncio.TaskGroup], Awaitable[tuple[Client, Metrics]]]] = {
    "running": running,
    "prefill": in_prefill,
}


# The cost of a cancelled request


def labels_of(request: Request) -> dict[str, str]:
    endpoint = "generate" if request.protocol == "grpc" else ENDPOINTS[request.is_chat]
    request_type = "unary" if request.protocol == "unary" else "stream"
    return {"model": request.model, "endpoint": endpoint, "request_type": request_type}


async def check_counted(lane: Lane, ending: str, before: Metrics) -> None:
    """Wait until the end is counted exactly once, with its cause, and nothing else of that model is."""
    labels = labels_of(lane.request)

    async def is_counted() -> bool:
        metrics = await read_metrics(lane.frontend)
        return count_cancellations(metrics, ending, **labels) == count_cancellations(before, ending, **labels) + 1

    await until(is_counted)
    model = {"model": lane.request.model}
    assert (await read_metrics(lane.frontend)).sum(CANCELLATIONS, **model) == before.sum(CANCELLATIONS, **model) + 1


@pytest.mark.parametrize("ending", CAUSES)
@pytest.mark.parametrize("state", STATES)
def test_engine_makes_at_most_two_more_steps(lanes: list[Lane], state: str, ending: str) -> None:
    async def scenario(lane: Lane) -> None:
        before_ending = await read_metrics(lane.frontend)
        async with asyncio.TaskGroup() as group:
            client, begun = await STATES[state](lane, ending, group)
            await end_request(client, ending)
            await check_counted(lane, ending, before_ending)
            ended = await read_metrics(lane.worker)  # Not before: the frontend may notice late.
            await wait_load(lane.worker, 0, 0)
            await check_client_error(client, ending)
        after = await read_metrics_at_rest(lane.worker, STEP_MS * 1e-3)
        worth = lane.request.n if state == "running" else CHUNK_TOKENS
        steps_max = lane.plane.engine.steps_max
        assert after.engine_tokens - ended.engine_tokens <= steps_max * worth, lane.request
        assert after.sum(LATE) - begun.sum(LATE) <= steps_max * worth

    asyncio.run(side_by_side(lanes, scenario))


async def side_by_side(lanes: Sequence[Lane], scenario: Callable[[Lane], Coroutine[Any, Any, None]]) -> None:
    await run_together(scenario(lane) for lane in lanes)
    await wait_idle(lanes[0].frontend, *(lane.worker for lane in lanes))


@pytest.mark.parametrize("ending", CAUSES)
def test_request_cancelled_in_the_queue_never_reaches_the_engine(lanes: list[Lane], ending: str) -> None:
    async def scenario(lane: Lane) -> None:
        before_ending = await read_metrics(lane.frontend)
        async with asyncio.TaskGroup() as group:
            holder = Request("grpc", model=lane.request.model, max_tokens=ENDLESS)
            holders = [Client(lane.frontend, holder).start(group) for _ in range(SLOTS)]
            await until(lambda: all(one.has_begun for one in holders))
            before = await read_metrics(lane.worker)
            client = lane.client(ending).start(group)
            await wait_load(lane.worker, SLOTS, lane.request.n)
            await end_request(client, ending)
            after = await wait_load(lane.worker, SLOTS, 0)
            await check_client_error(client, ending)
            await check_counted(lane, ending, before_ending)
            assert after.prompt_tokens == before.prompt_tokens
            assert all(one.ended is None for one in holders)
            for one in holders:
                one.hang_up()

    asyncio.run(side_by_side(lanes, scenario))


@pytest.mark.parametrize("timeout_s", [0.9, 3.013])
def test_grpc_deadline_is_not_counted_as_a_disconnect(lanes: list[Lane], timeout_s: float) -> None:
    """The client's timer may fire first: from one second on, gRPC rounds the timeout that it sends to the server up.

    A request that a busy machine delays by more than DEADLINE_TRAVEL_S is counted as a disconnect, so others follow.
    """
    lane = lanes[0]
    labels = labels_of(lane.request) | {"cause": "deadline"}

    async def counts_a_deadline() -> bool:
        before = await read_metrics(lane.frontend)
        async with asyncio.TaskGroup() as group:
            client = Client(lane.frontend, replace(lane.request, timeout_s=timeout_s)).start(group)
            assert (await client.refusal()).is_deadline
        await wait_load(lane.worker, 0, 0)
        await check_counted(lane, "deadline", before)
        return (await read_metrics(lane.frontend)).sum(CANCELLATIONS, **labels) > before.sum(CANCELLATIONS, **labels)

    asyncio.run(until(counts_a_deadline))


def test_every_cancel_signal_arrives_and_no_worker_is_blamed(lanes: list[Lane]) -> None:
    """Runs after all cancellations of the tests above."""
    frontend = lanes[0].frontend

    async def signals() -> tuple[float, float]:
        sent = (await read_metrics(frontend)).sum("dynamo_frontend_cancel_signals_total")
        workers = [await read_metrics(lane.worker) for lane in lanes]
        return sent, sum(one.sum("dynamo_component_cancellation_total", cause="signal") for one in workers)

    async def scenario() -> None:
        async def are_equal() -> bool:
            sent, arrived = await signals()
            return sent == arrived > 0

        await until(are_equal)
        for lane in lanes:
            assert await answer(frontend, replace(lane.request, max_tokens=1))
            metrics = await read_metrics(lane.worker)
            name = "dynamo_component_cancellation_total"
            from_engine = metrics.sum(name, phase="prefill") + metrics.sum(name, phase="running")
            assert metrics.sum("unbroken_engine_aborts_total") == from_engine > 0

    asyncio.run(scenario())
    assert not frontend.events_until_now("worker lost")
    assert not frontend.events_until_now(level="error")
    assert not [lane.worker.name for lane in lanes if lane.worker.events_until_now(level="error")]


def test_worker_drops_the_requests_of_a_killed_frontend(lanes: list[Lane]) -> None:
    """No frontend cancels these requests: the worker itself must notice that its session has ended."""
    worker = lanes[0].worker
    long, short = replace(lanes[0].request, prompt=LONG), replace(lanes[0].request, prompt="go")

    async def scenario(plane: Plane) -> None:
        frontend = plane.start_frontend()
        await until(lambda: frontend.has_found(worker))
        requests = (short, long, short)  # One runs, one is in prefill, one is queued.
        async with asyncio.TaskGroup() as group:
            clients = [Client(frontend, request).start(group) for request in requests]
            await wait_load(worker, SLOTS, len(requests) - SLOTS)
            before = await read_metrics(worker)
            frontend.kill()
            await wait_load(worker, 0, 0)
        assert {client.ended.code for client in clients if isinstance(client.ended, Refused)} == {"UNAVAILABLE"}
        after = await read_metrics_at_rest(worker, STEP_MS * 1e-3)
        steps_max = lanes[0].plane.engine.steps_max
        assert after.engine_tokens - before.engine_tokens <= steps_max * (CHUNK_TOKENS + 1)
        assert await answer(lanes[0].frontend, replace(short, max_tokens=1))

    asyncio.run(scenario(lanes[0].plane))


@pytest.mark.parametrize("ending", CAUSES)
def test_worker_whose_requests_were_cancelled_is_not_avoided(start_plane: Start, ending: str) -> None:
    """A worker that failed would be avoided for 5 s, so both requests would go to the other one."""
    plane = start_plane()

    async def scenario() -> None:
        ended = await plane.worker(*PACE)
        lane = await Lane.of(plane, ended, Request("grpc", max_tokens=ENDLESS))
        async with asyncio.TaskGroup() as group:
            client, _ = await running(lane, ending, group)
            await end_request(client, ending)
            await wait_load(ended, 0, 0)
            other = await plane.worker(*PACE)
            clients = [Client(plane.frontend, lane.request).start(group) for _ in range(2)]
            await run_together(wait_load(worker, 1, 0) for worker in (ended, other))
            for one in clients:
                one.hang_up()

    asyncio.run(scenario())


def test_cancelling_twice_or_an_unknown_request_changes_nothing(lanes: list[Lane]) -> None:
    lane = lanes[0]

    async def scenario() -> None:
        async with asyncio.TaskGroup() as group:
            victim = Client(lane.frontend, replace(lane.request, request_id="victim")).start(group)
            other = Client(lane.frontend, replace(lane.request, request_id="victim-2")).start(group)
            await until(lambda: victim.has_begun and other.has_begun)
            assert await cancel_over_http(lane.frontend, "nobody") == 0
            assert await cancel_over_grpc(lane.frontend, "victi") == 0
            assert await cancel_over_http(lane.frontend, "victim") == 1
            assert (await victim.refusal()).reason == "CANCELLED"
            assert await cancel_over_http(lane.frontend, "victim") == 0
            assert await cancel_over_grpc(lane.frontend, "victim") == 0
            await wait_load(lane.worker, 1, 0)
            assert other.ended is None
            other.hang_up()
        await wait_idle(lane.frontend, lane.worker)

    asyncio.run(scenario())
