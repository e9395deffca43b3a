"""With a real model too, a cancelled request costs the engine at most two more steps.

| workload | nemesis | checker |
| --- | --- | --- |
| requests of each kind, in prefill or running | disconnected, or cancelled by request id | the engine's own count |
"""

import asyncio
from dataclasses import replace
from functools import partial
from operator import attrgetter

import pytest

from tests.integration.conftest import Start
from tests.integration.harness.clients.cancellations import check_client_error, end_request, metrics_if_grown
from tests.integration.harness.clients.client import Client
from tests.integration.harness.clients.requests import PROTOCOLS, Request
from tests.integration.harness.clients.send import answer
from tests.integration.harness.metrics import read_metrics, wait_idle, wait_load
from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.plane.processes import Process
from tests.integration.harness.waiting import until

pytestmark = pytest.mark.model

OPTIONS = (
    "--engine=llamacpp",
    "--model=smollm2",
    "--served-model-name=real",
    "--threads=1",
    "--engine-request-limit=2",
)
PIECE_TOKENS = 16
"""Prompt tokens per step; see LlamaCppConfig."""
STEPS_MAX = 2
PROMPTS, ANSWERS = attrgetter("prompt_tokens"), attrgetter("generated_tokens")
LATE = "unbroken_engine_tokens_after_cancel_total"
STATES = {
    "running": (Request(model="real", prompt="Once", max_tokens=1900), ANSWERS, 1),
    "prefill": (Request(model="real", prompt="once upon a time " * 400, max_tokens=100), PROMPTS, PIECE_TOKENS),
}
"""The request, the count that grows once it is in this state, and the tokens that a step computes."""


@pytest.fixture(scope="module")
def real(start_plane: Start) -> tuple[Plane, Process]:
    plane = start_plane()
    return plane, asyncio.run(plane.worker(*OPTIONS))


@pytest.mark.parametrize("ending", ["disconnect", "rpc"])
@pytest.mark.parametrize("state", STATES)
def test_engine_makes_at_most_two_more_steps(real: tuple[Plane, Process], state: str, ending: str) -> None:
    plane, worker = real
    request, counter, worth = STATES[state]
    short = Request("grpc", model="real", max_tokens=8)

    async def scenario() -> None:
        undisturbed = await answer(plane.frontend, short)
        for protocol in PROTOCOLS:
            before = await read_metrics(worker)
            async with asyncio.TaskGroup() as group:
                client = Client(
                    plane.frontend, replace(request, protocol=protocol, request_id=f"{state}-{ending}-{protocol}")
                )
                client.start(group)
                await until(partial(metrics_if_grown, worker, before, counter))
                await end_request(client, ending)
                await wait_load(worker, 0, 0)
                await check_client_error(client, ending)
            assert await answer(plane.frontend, short) == undisturbed
            after = await read_metrics(worker)
            assert after.sum(LATE) - before.sum(LATE) <= STEPS_MAX * worth, protocol
        await wait_idle(worker, plane.frontend)

    asyncio.run(scenario())
    assert not plane.frontend.events_until_now("worker lost")
