"""A request that is cancelled while it moves costs the next worker at most two steps.

| workload | nemesis | checker |
| --- | --- | --- |
| endless requests of each kind, whose only worker dies | each of CAUSES, then another worker | it never receives them |
| the same, in prefill on another worker | each of CAUSES | two steps, gauges 0 |
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

import pytest

from tests.integration.conftest import Start, on_both_engines
from tests.integration.harness.clients.cancellations import (
    CAUSES,
    KINDS,
    check_client_error,
    count_cancellations,
    deadline_s,
    end_request,
    metrics_if_grown,
)
from tests.integration.harness.clients.client import ENDLESS, Client
from tests.integration.harness.clients.requests import Request
from tests.integration.harness.clients.send import answer, run_together
from tests.integration.harness.metrics import read_metrics, read_metrics_at_rest, wait_idle, wait_load
from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.plane.processes import Process
from tests.integration.harness.waiting import until

pytestmark = on_both_engines

STEP_MS = 80
CHUNK_TOKENS = 10
PACE = (f"--mocker-itl-ms={STEP_MS}", f"--mocker-prefill-chunk-tokens={CHUNK_TOKENS}")
LONG = "p" * 10_000


@pytest.mark.parametrize("ending", CAUSES)
def test_request_cancelled_between_workers_never_starts_on_another(start_plane: Start, ending: str) -> None:
    """The next worker starts after the requests were cancelled, and must never receive them."""
    plane = start_plane()
    requests = [replace(request, max_tokens=ENDLESS) for request in KINDS.values()]

    async def scenario() -> None:
        victim, took_s = await started(plane, "--mocker-itl-ms=5", "--migration-limit=3")
        async with asyncio.TaskGroup() as group:
            clients = start_all(plane, requests, ending, group, took_s)
            await wait_load(victim, sum(request.n for request in requests), 0)
            victim.kill()
            await until(lambda: plane.frontend.events("worker lost"))
            await run_together(end_request(client, ending) for client in clients)
            for client in clients:
                await check_client_error(client, ending)
        await wait_idle(plane.frontend)
        successor = await plane.worker()
        nothing = await read_metrics(successor)
        await answer(plane.frontend, Request("grpc", prompt="next", max_tokens=3))
        assert (await read_metrics(successor)).engine_tokens - nothing.engine_tokens == len("next") + 3
        assert await are_counted(plane, ending, len(requests))
        assert not plane.frontend.events_until_now(level="error")

    asyncio.run(scenario())


async def are_counted(plane: Plane, ending: str, count: int) -> bool:
    """Whether the frontend has counted this many cancellations."""
    return count_cancellations(await read_metrics(plane.frontend), ending) == count


async def started(plane: Plane, *options: str) -> tuple[Process, float]:
    """Start a worker; return it and the time that this took."""
    began = time.monotonic()
    return await plane.worker(*options), time.monotonic() - began


def start_all(
    plane: Plane, requests: Sequence[Request], ending: str, group: asyncio.TaskGroup, worker_s: float
) -> list[Client]:
    """Start a client for each request. `worker_s`: the time to start a worker, which every deadline must exceed."""
    timeout_s = deadline_s(worker_s) if ending == "deadline" else None
    named = [request.named(f"moving-{number}", timeout_s=timeout_s) for number, request in enumerate(requests)]
    return [Client(plane.frontend, request).start(group) for request in named]


@pytest.mark.parametrize("ending", CAUSES)
def test_request_cancelled_in_prefill_after_a_move_stops(start_plane: Start, ending: str) -> None:
    plane = start_plane()
    requests = [replace(request, max_tokens=ENDLESS, prompt=LONG) for request in KINDS.values()]

    async def scenario() -> None:
        victim, took_s = await started(plane, "--mocker-itl-ms=5", "--mocker-prefill-chunk-tokens=1000000")
        async with asyncio.TaskGroup() as group:
            clients = start_all(plane, requests, ending, group, took_s)
            await wait_load(victim, sum(request.n for request in requests), 0)
            successor = await plane.worker(*PACE)
            victim.kill()
            nothing = await read_metrics(successor)
            await until(lambda: metrics_if_grown(successor, nothing, attrgetter("prompt_tokens")))
            await wait_load(successor, sum(request.n for request in requests), 0)
            await run_together(end_request(client, ending) for client in clients)
            await until(lambda: are_counted(plane, ending, len(requests)))
            before = await read_metrics(successor)
            await wait_load(successor, 0, 0)
            for client in clients:
                await check_client_error(client, ending)
        after = await read_metrics_at_rest(successor, STEP_MS * 1e-3)
        assert after.engine_tokens - before.engine_tokens <= plane.engine.steps_max * CHUNK_TOKENS
        await wait_idle(successor, plane.frontend)
        assert not plane.frontend.events_until_now(level="error")

    asyncio.run(scenario())
