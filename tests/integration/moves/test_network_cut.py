"""A worker whose packets vanish without a trace counts as lost; when the network is back, it serves again.

| workload | nemesis | checker |
| --- | --- | --- |
| 12 streams on a worker in its own namespace | packets dropped in both directions | `Answer`, all moved for STALLED |
| the same | packets to the worker dropped, its own arrive | the same |
| the same | the network is back | the worker is found again and serves |
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.integration.harness.clients.requests import PROTOCOLS, Request
from tests.integration.harness.clients.send import answer, answers_under_fault, move_reasons, undisturbed_answers
from tests.integration.harness.plane.fork_server import ForkServer
from tests.integration.harness.plane.network import Cable, cable
from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.plane.processes import Process
from tests.integration.harness.waiting import until

pytestmark = pytest.mark.netns

STREAMS = 12
ITL, SLOW = "--mocker-itl-ms=5", "--mocker-itl-ms=200"
ASKS = [
    Request(PROTOCOLS[number % 3], is_chat=number % 2 == 0, temperature=0.8, seed=number, max_tokens=200)
    for number in range(STREAMS)
]


@dataclass(frozen=True)
class Setup:
    """A plane, and a fork server for workers at the other end of a cable."""

    plane: Plane
    cable: Cable
    remote_server: ForkServer

    async def remote_worker(self) -> Process:
        address = f"--listen={self.cable.there}:0"
        return await self.plane.found(self.plane.launch(SLOW, address, fork_server=self.remote_server))


@pytest.fixture
def prepared(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    with cable() as one:
        plane = Plane(
            fork_server,
            tmp_path_factory.mktemp("plane"),
            registry=(f"--listen={one.here}:0",),
            frontend=("--stall-ms=3000",),
            is_patient=True,
        )
        remote_server = ForkServer(*one.prefix)
        yield Setup(plane, one, remote_server)
        plane.close()
        remote_server.close()


@pytest.mark.parametrize("is_one_way", [False, True], ids=["both ways", "one way"])
def test_streams_leave_a_worker_behind_a_cut_network(prepared: Setup, is_one_way: bool) -> None:
    plane = prepared.plane

    async def scenario() -> None:
        undisturbed = await undisturbed_answers(plane, ASKS)
        cut_off = await prepared.remote_worker()

        async def cut() -> None:
            await plane.worker(ITL)
            prepared.cable.cut(is_one_way=is_one_way)

        assert await answers_under_fault(plane.frontend, ASKS, cut, cut_off) == undisturbed
        assert move_reasons(plane.frontend, ASKS) == [["STALLED"]] * STREAMS
        prepared.cable.mend()
        instance = cut_off.ready["instance_id"]
        await until(lambda: len(plane.frontend.events("worker found", instance=instance)) == 2)
        before = await cut_off.metric("unbroken_engine_steps_total")
        await until(lambda: serves(plane, cut_off, before))

    asyncio.run(scenario())
    assert not plane.frontend.events_until_now(level="error")


async def serves(plane: Plane, worker: Process, steps: float) -> bool:
    """Send one request; return whether the worker has made a step since it had made `steps`."""
    await answer(plane.frontend, Request(max_tokens=1))
    return await worker.metric("unbroken_engine_steps_total") > steps
