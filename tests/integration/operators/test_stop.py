"""A frozen worker (SIGSTOP) is a lost worker: its streams go on elsewhere, and nothing it says when it thaws is heard.

| workload | nemesis | checker |
| --- | --- | --- |
| streams of all kinds | SIGSTOP under all of them | `Answer`, all moved for STALLED |
| the same | SIGCONT while the moved streams still run | `Answer`, nothing twice; the worker serves again |
"""

import asyncio
from signal import SIGCONT, SIGSTOP

from tests.integration.conftest import Start, on_both_engines
from tests.integration.harness.asks import PROTOCOLS, Ask
from tests.integration.harness.clients import answer, move_reasons, under_streams, without_faults
from tests.integration.harness.engines import movable
from tests.integration.harness.plane import Plane, Process, until

pytestmark = on_both_engines

STREAMS = 12
ITL, SLOW = "--mocker-itl-ms=3", "--mocker-itl-ms=40"
ASKS = [
    Ask(PROTOCOLS[number % 3], is_chat=number % 2 == 0, temperature=0.8, seed=number, max_tokens=300)
    for number in range(STREAMS)
]


def test_every_stream_of_a_frozen_worker_goes_on_elsewhere(start_plane: Start) -> None:
    plane = start_plane()
    asks = movable(plane.engine, ASKS)

    async def scenario() -> None:
        undisturbed = await without_faults(plane, asks)
        frozen = await plane.worker(SLOW)

        async def freeze() -> None:
            await plane.worker(ITL)
            frozen.signal(SIGSTOP)

        assert await under_streams(plane.frontend, asks, freeze) == undisturbed
        assert move_reasons(plane.frontend, asks) == [["STALLED"]] * STREAMS

    asyncio.run(scenario())


def test_a_worker_that_thaws_serves_again_and_its_late_tokens_reach_nobody(start_plane: Start) -> None:
    plane = start_plane()
    asks = movable(plane.engine, ASKS)

    async def scenario() -> None:
        undisturbed = await without_faults(plane, asks)
        frozen = await plane.worker(SLOW)

        async def freeze_and_thaw() -> None:
            await plane.worker(ITL)
            frozen.signal(SIGSTOP)
            await until(lambda: all(move_reasons(plane.frontend, asks)))
            frozen.signal(SIGCONT)

        assert await under_streams(plane.frontend, asks, freeze_and_thaw) == undisturbed
        instance = frozen.ready["instance_id"]
        await until(lambda: len(plane.frontend.events("worker found", instance=instance)) == 2)
        await until(lambda: runs_nothing(frozen))
        before = await frozen.metric("unbroken_engine_steps_total")
        await until(lambda: serves(plane, frozen, before))

    asyncio.run(scenario())


async def runs_nothing(worker: Process) -> bool:
    return await worker.metric("dynamo_engine_request") == 0


async def serves(plane: Plane, worker: Process, steps: float) -> bool:
    """Ask once; has the worker made a step since it had made `steps`?"""
    await answer(plane.frontend, Ask(max_tokens=1))
    return await worker.metric("unbroken_engine_steps_total") > steps
