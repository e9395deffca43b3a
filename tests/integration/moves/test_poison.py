"""A request that kills every worker that it reaches is stopped after two, and no other request suffers.

| workload | nemesis | checker |
| --- | --- | --- |
| a prompt that kills its worker, by gRPC, SSE and unary HTTP | – | POISON_REQUEST, two of three workers dead |
| 12 streams of all kinds on the same workers | the same | `Answer` |
"""

import asyncio

import pytest

from tests.integration.conftest import Start
from tests.integration.harness.clients.answers import Answer, Refused
from tests.integration.harness.clients.requests import PROTOCOLS, Request
from tests.integration.harness.clients.send import answer, answers_under_fault, outcome, run_together
from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.plane.processes import Process
from tests.integration.harness.waiting import until

OPTIONS = ("--mocker-itl-ms=5", "--mocker-fault=die_on_token=7")
POISON = "ring \a the bell"
"""The bell character is byte 7, and the mocker's tokens are bytes."""
BYSTANDERS = [
    Request(PROTOCOLS[number % 3], is_chat=number % 2 == 0, temperature=0.8, seed=number, max_tokens=100)
    for number in range(12)
]
CODES = {"grpc": "INTERNAL", "stream": 500, "unary": 500}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_poison_request_is_refused_after_two_deaths_and_harms_no_other(start_plane: Start, protocol: str) -> None:
    plane = start_plane()

    async def scenario() -> tuple[list[Answer], Answer | Refused]:
        workers = [await plane.worker(*OPTIONS) for _ in range(3)]
        undisturbed = await run_together(answer(plane.frontend, request) for request in BYSTANDERS)
        refusals = []

        async def poison() -> None:
            refusals.append(await outcome(plane.frontend, Request(protocol, prompt=POISON)))

        assert await answers_under_fault(plane.frontend, BYSTANDERS, poison) == undisturbed
        await check_one_survives(plane, workers)
        return undisturbed, refusals[0]

    undisturbed, refused = asyncio.run(scenario())
    assert isinstance(refused, Refused)
    assert (refused.code, refused.reason) == (CODES[protocol], "POISON_REQUEST")
    assert refused.error["retryable"] in (False, "false")
    assert asyncio.run(answer(plane.frontend, BYSTANDERS[0])) == undisturbed[0]


async def check_one_survives(plane: Plane, workers: list[Process]) -> None:
    """Check that two of the three workers died by SIGKILL."""
    await until(lambda: len(plane.frontend.events("worker lost")) == 2)
    await until(lambda: sorted(worker.status() or 0 for worker in workers) == [-9, -9, 0])
