"""Answers that nobody comes back for are bounded: in time, and as any request is.

| workload | nemesis | checker |
| --- | --- | --- |
| an endless stream of each kind that may be left | its client leaves for good | STEPS after the grace; 410; gauges 0 |
| endless streams that are not to outlive their client | the client leaves | STEPS; 404; gauges 0 |
| one that outlives it, whose client does not know its id | the same, before the response has begun | gauges 0 |
| streams that fill all slots and the queue | their clients leave | a further request is refused until they end |
| a detached stream | cancelled by its id, at either frontend | STEPS; 404; gauges 0 |
| a stream that outlives its client | its worker freezes until it has moved | gauges 0 there, long before its grace |

STEPS: the engine generates at most two steps' tokens after that.
"""

import asyncio
import time
from signal import SIGCONT, SIGSTOP
from typing import Any

import pytest

from tests.integration.conftest import Start
from tests.integration.harness.clients.answers import Refused
from tests.integration.harness.clients.cancellations import cancel_over_grpc, cancel_over_http
from tests.integration.harness.clients.requests import Request
from tests.integration.harness.clients.returning import CONTINUE, ReturningClient
from tests.integration.harness.clients.send import outcome, run_together
from tests.integration.harness.metrics import read_metrics, read_metrics_at_rest, wait_idle, wait_load
from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.plane.processes import Process
from tests.integration.harness.waiting import until
from tests.integration.resume.conftest import ENDLESS

STEP_S = 0.08
STEPS_MAX = 2
GRACE_S = 2
EVENTS = 3
DETACHED = ("unbroken_detached_requests", "unbroken_detached_records", "unbroken_detached_bytes")
KINDS: dict[str, dict[str, Any]] = {
    "one": ENDLESS,
    "two choices": {**ENDLESS, "n": 2},
    "prompts": {**ENDLESS, "prompt": ["One", "Two"]},
    "log probabilities": {**ENDLESS, "logprobs": 2},
}


async def start(start_plane: Start, *options: str) -> tuple[Plane, Process]:
    plane = start_plane()
    return plane, await plane.worker(f"--mocker-itl-ms={STEP_S * 1e3:g}", *options)


async def reason(client: ReturningClient, plane: Plane) -> tuple[int | str, str]:
    """The status and the reason for which the client gets no answer."""
    with pytest.raises(Refused) as refused:
        await client.come_back(plane.frontend)
    return refused.value.code, refused.value.reason


async def wait_released(plane: Plane, worker: Process) -> None:
    """Wait until nothing runs and nothing is kept."""
    await wait_idle(worker, plane.frontend)
    metrics = await read_metrics(worker)
    assert {name: metrics.sum(name) for name in DETACHED} == dict.fromkeys(DETACHED, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_answer_ends_when_nobody_comes_back_within_its_grace(start_plane: Start, kind: str) -> None:
    client = ReturningClient(KINDS[kind], {**CONTINUE, "X-Detach-Grace": str(GRACE_S)})

    async def scenario() -> float:
        plane, worker = await start(start_plane)
        await client.ask(plane.frontend, events_max=EVENTS)
        await until(lambda: has_detached(worker))
        choices = (await read_metrics(worker)).running
        left_at, count = time.monotonic(), (await read_metrics(worker)).generated_tokens
        assert await worker.metric("unbroken_detached_requests") == choices > 0
        await wait_released(plane, worker)
        waited_s = time.monotonic() - left_at
        rest = await read_metrics_at_rest(worker, STEP_S)
        assert waited_s > GRACE_S / 2
        assert rest.generated_tokens - count <= choices * (waited_s / STEP_S + STEPS_MAX)
        assert await worker.metric("unbroken_engine_tokens_after_cancel_total") <= choices * STEPS_MAX
        assert await reason(client, plane) == (410, "STREAM_EXPIRED")
        return waited_s

    asyncio.run(scenario())


async def has_detached(worker: Process) -> bool:
    return await worker.metric("unbroken_detached_requests") > 0


@pytest.mark.parametrize("headers", [{}, {"X-On-Disconnect": "cancel"}], ids=["by default", "as asked"])
def test_client_that_leaves_without_having_asked_frees_its_engine(start_plane: Start, headers: dict[str, str]) -> None:
    client = ReturningClient(ENDLESS, headers, needs_ids=False)

    async def scenario() -> None:
        plane, worker = await start(start_plane)
        await client.ask(plane.frontend, events_max=EVENTS)
        await wait_released(plane, worker)
        assert await worker.metric("unbroken_engine_tokens_after_cancel_total") <= STEPS_MAX
        client.generation_id = "0" * 32
        assert await reason(client, plane) == (404, "STREAM_NOT_FOUND")

    asyncio.run(scenario())


def test_answer_whose_id_nobody_knows_ends_with_its_client(start_plane: Start) -> None:
    """Its client waits in the queue, so that the response has not begun."""

    async def scenario() -> None:
        plane, worker = await start(start_plane, "--engine-request-limit=1")
        async with asyncio.TaskGroup() as group:
            first = group.create_task(ReturningClient(ENDLESS, {}, needs_ids=False).ask(plane.frontend))
            await wait_load(worker, 1, 0)
            second = group.create_task(ReturningClient(ENDLESS).ask(plane.frontend))
            await wait_load(worker, 1, 1)
            second.cancel()
            await wait_load(worker, 1, 0)
            first.cancel()
        await wait_released(plane, worker)

    asyncio.run(scenario())


def test_answers_without_a_client_count_in_the_limits_of_their_worker(start_plane: Start) -> None:
    async def scenario() -> None:
        plane, worker = await start(start_plane, "--engine-request-limit=2", "--request-queue-limit=1")
        clients = [ReturningClient(ENDLESS) for _ in range(2)]
        await run_together(client.ask(plane.frontend, events_max=EVENTS) for client in clients)
        await until(lambda: are_detached(worker, 2))
        chosen = ReturningClient(ENDLESS, {**CONTINUE, "X-Request-Id": "f" * 32}, generation_id="f" * 32)
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(chosen.ask(plane.frontend))
            await wait_load(worker, 2, 1)
            asking.cancel()
        await until(lambda: are_detached(worker, 3))
        refused = await outcome(plane.frontend, Request())
        assert isinstance(refused, Refused)
        assert (refused.reason, (await read_metrics(worker)).waiting) == ("OVERLOADED", 1)
        for client in (*clients, chosen):
            assert await cancel_over_http(plane.frontend, client.generation_id) == 1
        await wait_released(plane, worker)
        assert not isinstance(await outcome(plane.frontend, Request()), Refused)

    asyncio.run(scenario())


async def are_detached(worker: Process, count: int) -> bool:
    return await worker.metric("unbroken_detached_requests") == count


@pytest.mark.parametrize("cancel", [cancel_over_http, cancel_over_grpc])
@pytest.mark.parametrize("kind", ["one", "two choices"])
def test_answer_without_a_client_is_cancelled_by_its_id_at_any_frontend(
    start_plane: Start, cancel: Any, kind: str
) -> None:
    client = ReturningClient(KINDS[kind])

    async def scenario() -> None:
        plane, worker = await start(start_plane)
        other = plane.start_frontend()
        await until(lambda: other.has_found(worker))
        await client.ask(plane.frontend, events_max=EVENTS)
        await until(lambda: are_detached(worker, KINDS[kind]["n"]))
        assert await cancel(other, client.generation_id) >= 1
        await wait_released(plane, worker)
        assert await worker.metric("unbroken_engine_tokens_after_cancel_total") <= KINDS[kind]["n"] * STEPS_MAX
        assert await reason(client, plane) == (404, "STREAM_NOT_FOUND")

    asyncio.run(scenario())


def test_worker_that_wakes_up_after_its_stream_has_moved_is_freed(start_plane: Start) -> None:
    """A bug: it went on with the stream for all of its grace, and nobody could ever want that."""
    client = ReturningClient(ENDLESS, {**CONTINUE, "X-Detach-Grace": "300"})

    async def scenario() -> None:
        plane = start_plane(frontend=("--stall-ms=1000",))
        frozen = await plane.worker(f"--mocker-itl-ms={STEP_S * 1e3:g}")
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(client.ask(plane.frontend))
            await until(lambda: len(client.ids) >= EVENTS)
            other = await plane.worker(f"--mocker-itl-ms={STEP_S * 1e3:g}")
            frozen.signal(SIGSTOP)
            await plane.frontend.logged("request moved")
            frozen.signal(SIGCONT)
            await wait_idle(frozen)
            assert await frozen.metric("unbroken_detached_records") == 0
            assert (await read_metrics(other)).running == 1
            asking.cancel()
        assert await cancel_over_http(plane.frontend, client.generation_id) == 1
        await wait_idle(other, plane.frontend)

    asyncio.run(scenario())
