"""With a real model, too, whoever does not want an answer any more costs the engine two more steps at most.

| workload | nemesis | checker |
| --- | --- | --- |
| requests of each kind, in prefill or running | hung up, or cancelled by name | the engine's own count |
"""

import asyncio
from dataclasses import replace
from functools import partial
from operator import attrgetter

import pytest

from tests.integration.conftest import Start
from tests.integration.harness.asks import PROTOCOLS, Ask
from tests.integration.harness.clients import answer
from tests.integration.harness.endings import check_told, end, reading_with
from tests.integration.harness.plane import Plane, Process, until
from tests.integration.harness.readings import read, wait_load, wait_quiet
from tests.integration.harness.visits import Visit

pytestmark = pytest.mark.model

OPTIONS = (
    "--engine=llamacpp",
    "--model=smollm2",
    "--served-model-name=real",
    "--threads=1",
    "--engine-request-limit=2",
)
PIECE_TOKENS = 16
"""Of a prompt in one step; see LlamaCppConfig."""
STEPS_MAX = 2
PROMPTS, ANSWERS = attrgetter("prompt_tokens"), attrgetter("told_tokens")
LATE = "unbroken_engine_tokens_after_cancel_total"
STATES = {
    "running": (Ask(model="real", prompt="Once", max_tokens=1900), ANSWERS, 1),
    "prefill": (Ask(model="real", prompt="once upon a time " * 400, max_tokens=100), PROMPTS, PIECE_TOKENS),
}
"""What is asked, what grows when it is there, and what a step computes."""


@pytest.fixture(scope="module")
def real(start_plane: Start) -> tuple[Plane, Process]:
    plane = start_plane(frontend=("--stall-ms=3000",))
    return plane, asyncio.run(plane.worker(*OPTIONS))


@pytest.mark.parametrize("way", ["leaves", "rpc"])
@pytest.mark.parametrize("state", STATES)
def test_the_engine_makes_two_more_steps_at_most(real: tuple[Plane, Process], state: str, way: str) -> None:
    plane, worker = real
    ask, counter, worth = STATES[state]
    short = Ask("grpc", model="real", max_tokens=8)

    async def scenario() -> None:
        undisturbed = await answer(plane.frontend, short)
        for protocol in PROTOCOLS:
            before = await read(worker)
            async with asyncio.TaskGroup() as group:
                visit = Visit(plane.frontend, replace(ask, protocol=protocol, request_id=f"{state}-{way}-{protocol}"))
                visit.start(group)
                await until(partial(reading_with, worker, before, counter))
                await end(visit, way)
                await wait_load(worker, 0, 0)
                await check_told(visit, way)
            assert await answer(plane.frontend, short) == undisturbed
            after = await read(worker)
            assert after.sum(LATE) - before.sum(LATE) <= STEPS_MAX * worth, protocol
        await wait_quiet(worker, plane.frontend)

    asyncio.run(scenario())
    assert not plane.frontend.events("worker lost")
