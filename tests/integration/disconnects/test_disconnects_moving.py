"""Whoever does not want an answer any more while it moves to another worker costs that one two steps at most.

| workload | nemesis | checker |
| --- | --- | --- |
| endless requests of each kind, whose only worker dies | each of CAUSES, then another worker | it never hears of them |
| the same, in prefill on another worker | each of CAUSES | two steps, gauges 0 |
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

import pytest

from tests.integration.conftest import Start, on_both_engines
from tests.integration.harness.asks import Ask
from tests.integration.harness.clients import answer, gathered
from tests.integration.harness.endings import CANCELLATIONS, CAUSES, KINDS, check_told, deadline_s, end, reading_with
from tests.integration.harness.plane import Plane, Process, until
from tests.integration.harness.readings import read, read_still, wait_load, wait_quiet
from tests.integration.harness.visits import ENDLESS, Visit

pytestmark = on_both_engines

STEP_MS = 80
CHUNK_TOKENS = 10
PACE = (f"--mocker-itl-ms={STEP_MS}", f"--mocker-prefill-chunk-tokens={CHUNK_TOKENS}")
LONG = "p" * 10_000


@pytest.mark.parametrize("way", CAUSES)
def test_one_on_the_move_begins_nowhere_any_more(start_plane: Start, way: str) -> None:
    """Its worker is killed and there is no other, until it has ended; the next worker never hears of it."""
    plane = start_plane()
    asks = [replace(ask, max_tokens=ENDLESS) for ask in KINDS.values()]

    async def scenario() -> None:
        victim, took_s = await started(plane, "--mocker-itl-ms=5", "--migration-limit=3")
        async with asyncio.TaskGroup() as group:
            visits = start_all(plane, asks, way, group, took_s)
            await wait_load(victim, sum(ask.n for ask in asks), 0)
            victim.kill()
            await until(lambda: plane.frontend.events("worker lost"))
            await gathered(end(visit, way) for visit in visits)
            for visit in visits:
                await check_told(visit, way)
        await wait_quiet(plane.frontend)
        heir = await plane.worker()
        nothing = await read(heir)
        await answer(plane.frontend, Ask("grpc", prompt="next", max_tokens=3))
        assert (await read(heir)).engine_tokens - nothing.engine_tokens == len("next") + 3
        assert await are_counted(plane, way, len(asks))
        assert not plane.frontend.events(level="error")

    asyncio.run(scenario())


async def are_counted(plane: Plane, way: str, count: int) -> bool:
    """Whether the frontend knows of so many endings."""
    return (await read(plane.frontend)).sum(CANCELLATIONS, cause=CAUSES[way]) == count


async def started(plane: Plane, *options: str) -> tuple[Process, float]:
    """A worker, and how long that took."""
    began = time.monotonic()
    return await plane.worker(*options), time.monotonic() - began


def start_all(plane: Plane, asks: Sequence[Ask], way: str, group: asyncio.TaskGroup, worker_s: float) -> list[Visit]:
    """worker_s: how long it takes to start a worker, which all of them have to outlive."""
    timeout_s = deadline_s(worker_s) if way == "deadline" else None
    named = [ask.named(f"moving-{number}", timeout_s=timeout_s) for number, ask in enumerate(asks)]
    return [Visit(plane.frontend, ask).start(group) for ask in named]


@pytest.mark.parametrize("way", CAUSES)
def test_one_that_has_moved_and_is_in_prefill_again_stops_like_any_other(start_plane: Start, way: str) -> None:
    plane = start_plane()
    asks = [replace(ask, max_tokens=ENDLESS, prompt=LONG) for ask in KINDS.values()]

    async def scenario() -> None:
        victim, took_s = await started(plane, "--mocker-itl-ms=5", "--mocker-prefill-chunk-tokens=1000000")
        async with asyncio.TaskGroup() as group:
            visits = start_all(plane, asks, way, group, took_s)
            await wait_load(victim, sum(ask.n for ask in asks), 0)
            heir = await plane.worker(*PACE)
            victim.kill()
            nothing = await read(heir)
            await until(lambda: reading_with(heir, nothing, attrgetter("prompt_tokens")))
            await wait_load(heir, sum(ask.n for ask in asks), 0)
            await gathered(end(visit, way) for visit in visits)
            await until(lambda: are_counted(plane, way, len(asks)))
            before = await read(heir)
            await wait_load(heir, 0, 0)
            for visit in visits:
                await check_told(visit, way)
        after = await read_still(heir, STEP_MS * 1e-3)
        assert after.engine_tokens - before.engine_tokens <= plane.engine.steps_max * CHUNK_TOKENS
        await wait_quiet(heir, plane.frontend)
        assert not plane.frontend.events(level="error")

    asyncio.run(scenario())
