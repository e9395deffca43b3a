"""A worker that was full is tried again soon: soon after the last refusal, whatever it reports.

| workload | nemesis | checker |
| --- | --- | --- |
| N + Q + 50 requests at once on the only worker, then none | load reports, or none | no refusal after FULL_S_MAX |
| 50 while another frontend has filled it, which then leaves | the same | the same |
"""

import asyncio
import time
from collections.abc import Awaitable, Sequence
from functools import partial

import pytest

from tests.integration.conftest import Start
from tests.integration.harness.clients.answers import Answer, Refused
from tests.integration.harness.clients.client import ENDLESS, Client
from tests.integration.harness.clients.requests import Request
from tests.integration.harness.clients.send import answer, is_answered, outcome, run_together
from tests.integration.harness.metrics import wait_idle, wait_load
from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.plane.processes import Frontend, Process
from tests.integration.harness.waiting import until

SLOTS, PLACES, TOO_MANY = 2, 3, 50
FULL_S_MAX = 5.0
"""A mark lasts for 1 s, which unit tests check with a clock of their own. The rest is for a busy machine."""
LIMITS = (f"--engine-request-limit={SLOTS}", f"--request-queue-limit={PLACES}", "--mocker-itl-ms=20")
PROTOCOLS = pytest.mark.parametrize("protocols", [("grpc",), ("stream", "unary")], ids=["grpc", "http"])
REPORTS = pytest.mark.parametrize("options", [(), ("--mocker-fault=mute_after=0",)], ids=["reports", "mute"])


async def check_soon_answered(frontend: Frontend, worker: Process, probes: Sequence[Request]) -> None:
    """Compares log times of the frontend, so that the duration of an answer does not matter."""
    await wait_load(worker, 0, 0)  # Any refusal by the worker came before this moment.
    has_room_at = time.time()
    for request in probes:
        await until(partial(is_answered, frontend, request))
    assert max(frontend.times("request", outcome="OVERLOADED")) <= has_room_at + FULL_S_MAX


async def burst(frontend: Frontend, probes: Sequence[Request], number: int) -> list[Refused]:
    """Send this many requests at once and return the refusals; all others must be answered equally."""
    outcomes = await run_together(outcome(frontend, probes[index % len(probes)]) for index in range(number))
    assert len({one.essence for one in outcomes if isinstance(one, Answer)}) <= 1, "equal requests, different answers"
    return [one for one in outcomes if isinstance(one, Refused)]


@PROTOCOLS
@REPORTS
def test_next_request_is_soon_answered_after_a_burst(
    start_plane: Start, options: tuple[str, ...], protocols: tuple[str, ...]
) -> None:
    plane = start_plane()
    probes = [Request(protocol, max_tokens=4) for protocol in protocols]

    async def scenario() -> None:
        worker = await plane.worker(*LIMITS, *options)
        undisturbed = await run_together(answer(plane.frontend, request) for request in probes)
        assert await burst(plane.frontend, probes, SLOTS + PLACES + TOO_MANY)
        await check_soon_answered(plane.frontend, worker, probes)
        assert await run_together(answer(plane.frontend, request) for request in probes) == undisturbed
        await wait_idle(worker, plane.frontend)

    asyncio.run(scenario())
    assert not plane.frontend.events_until_now("worker lost")


@PROTOCOLS
@REPORTS
def test_next_request_is_soon_answered_after_another_frontend_filled_the_worker(
    start_plane: Start, options: tuple[str, ...], protocols: tuple[str, ...]
) -> None:
    """A frontend counts its own requests. Only about another frontend's requests must the worker tell it."""
    plane = start_plane()
    probes = [Request(protocol, max_tokens=4) for protocol in protocols]

    async def scenario() -> None:
        worker = await plane.worker(*LIMITS, *options)
        refusals = await while_filled(plane, worker, burst(plane.frontend, probes, TOO_MANY))
        assert len(refusals) == TOO_MANY
        assert await worker.metric("dynamo_rejection_request_total") > 0
        await check_soon_answered(plane.frontend, worker, probes)
        await wait_idle(worker, plane.frontend)

    asyncio.run(scenario())


async def while_filled(plane: Plane, worker: Process, doing: Awaitable[list[Refused]]) -> list[Refused]:
    """Return the result of `doing` while another frontend occupies all slots and queue places."""
    other = plane.start_frontend()
    await until(lambda: other.has_found(worker))
    async with asyncio.TaskGroup() as group:
        clients = [Client(other, Request("grpc", max_tokens=ENDLESS)).start(group) for _ in range(SLOTS + PLACES)]
        await wait_load(worker, SLOTS, PLACES)
        refusals = await doing
        for client in clients:
            client.hang_up()
    return refusals
