"""A frozen worker (SIGSTOP) counts as lost: its streams move, and what it sends after it thaws is discarded.

| workload | nemesis | checker |
| --- | --- | --- |
| streams of all kinds | SIGSTOP of their worker | `Answer`, all moved for STALLED |
| the same | SIGCONT while the moved streams still run | `Answer`, no duplicates; the worker serves again |
"""

import asyncio
from signal import SIGCONT, SIGSTOP

from tests.integration.conftest import Start, on_both_engines
from tests.integration.harness.clients.requests import PROTOCOLS, Request
from tests.integration.harness.clients.send import answer, answers_under_fault, move_reasons, undisturbed_answers
from tests.integration.harness.plane.engines import movable_requests
from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.plane.processes import Process
from tests.integration.harness.waiting import until

pytestmark = on_both_engines

STREAMS = 12
ITL, SLOW = "--mocker-itl-ms=3", "--mocker-itl-ms=200"
STALL = ("--stall-ms=3000",)
"""The worker that is not frozen is never silent for as long, on a busy machine either."""
ASKS = [
    Request(PROTOCOLS[number % 3], is_chat=number % 2 == 0, temperature=0.8, seed=number, max_tokens=300)
    for number in range(STREAMS)
]


def test_every_stream_of_a_frozen_worker_moves(start_plane: Start) -> None:
    plane = start_plane(frontend=STALL)
    requests = movable_requests(plane.engine, ASKS)

    async def scenario() -> None:
        undisturbed = await undisturbed_answers(plane, requests)
        frozen = await plane.worker(SLOW)

        async def freeze() -> None:
            await plane.worker(ITL)
            frozen.signal(SIGSTOP)

        assert await answers_under_fault(plane.frontend, requests, freeze, frozen) == undisturbed
        assert move_reasons(plane.frontend, requests) == [["STALLED"]] * STREAMS

    asyncio.run(scenario())


def test_thawed_worker_serves_again_and_its_late_tokens_are_discarded(start_plane: Start) -> None:
    plane = start_plane(frontend=STALL)
    requests = movable_requests(plane.engine, ASKS)

    async def scenario() -> None:
        undisturbed = await undisturbed_answers(plane, requests)
        frozen = await plane.worker(SLOW)

        async def freeze_and_thaw() -> None:
            await plane.worker(ITL)
            frozen.signal(SIGSTOP)
            await until(lambda: all(move_reasons(plane.frontend, requests)))
            frozen.signal(SIGCONT)

        assert await answers_under_fault(plane.frontend, requests, freeze_and_thaw, frozen) == undisturbed
        instance = frozen.ready["instance_id"]
        await until(lambda: len(plane.frontend.events("worker found", instance=instance)) == 2)
        await until(lambda: runs_nothing(frozen))
        before = await frozen.metric("unbroken_engine_steps_total")
        await until(lambda: serves(plane, frozen, before))

    asyncio.run(scenario())


async def runs_nothing(worker: Process) -> bool:
    return await worker.metric("dynamo_engine_request") == 0


async def serves(plane: Plane, worker: Process, steps: float) -> bool:
    """Send one request; return whether the worker has made a step since it had made `steps`."""
    await answer(plane.frontend, Request(max_tokens=1))
    return await worker.metric("unbroken_engine_steps_total") > steps
