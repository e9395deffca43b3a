"""The client that comes back last gets the answer, whatever happens to its worker meanwhile.

| workload | nemesis | checker |
| --- | --- | --- |
| two clients with the same cursor | both come back at once, at two frontends | one has `whole`, the other TAKEN_OVER |
| a resumed stream | SIGKILL of its worker | `whole`, moved once |
| streams of each kind | SIGKILL of a worker while they are resumed | `whole` |
| a stream on a worker that drains | its client comes back elsewhere | `whole` |
| a stream on a frontend that drains | the same | `whole` |
| an answer that has finished | its client comes back, streamed or whole | `whole` |
"""

import asyncio
from signal import SIGTERM
from typing import Any

import pytest

from tests.integration.conftest import Start
from tests.integration.harness.clients.returning import ReturningClient, whole_of
from tests.integration.harness.clients.send import run_together
from tests.integration.harness.metrics import wait_idle
from tests.integration.harness.plane.processes import Process
from tests.integration.harness.waiting import until
from tests.integration.resume.conftest import PLAIN, Pair, start_pair

EVENTS = 9
PAIRS = 16


async def undisturbed(pair: Pair) -> ReturningClient:
    return await ReturningClient(PLAIN).ask(pair.other)


async def busy(pair: Pair) -> Process:
    """The worker that runs something."""

    async def found() -> Process | None:
        loads = [await worker.metric("dynamo_engine_request") for worker in pair.workers]
        return next((worker for worker, load in zip(pair.workers, loads, strict=True) if load), None)

    worker: Process = await until(found)
    return worker


def test_of_two_resumes_at_once_one_has_the_answer_and_the_other_is_told(pair: Pair) -> None:
    firsts = [ReturningClient(PLAIN) for _ in range(PAIRS)]
    seconds: list[ReturningClient] = []

    async def scenario() -> ReturningClient:
        whole = await undisturbed(pair)
        await run_together(client.ask(pair.frontend, events_max=EVENTS) for client in firsts)
        seconds.extend(client.twin() for client in firsts)
        both = [(one, frontend) for ones, frontend in ((firsts, pair.frontend), (seconds, pair.other)) for one in ones]
        await run_together(client.come_back_unless_taken(frontend) for client, frontend in both)
        await wait_idle(*pair.workers, pair.frontend, pair.other)
        return whole

    whole = asyncio.run(scenario())

    told = []
    for both in zip(firsts, seconds, strict=True):
        # The machine may be so busy that one has all of the answer before the other comes back: then both have it.
        told += [client.error for client in both if not client.has_ended]
        winners = [client for client in both if client.has_ended]
        assert winners
        assert all(client.whole == whole.whole for client in winners)
    assert told
    assert all(error is not None and error["code"] == "TAKEN_OVER" for error in told)


def test_resumed_answer_moves_when_its_worker_is_killed(pair: Pair) -> None:
    client = ReturningClient(PLAIN)

    async def scenario() -> ReturningClient:
        whole = await undisturbed(pair)
        await client.ask(pair.frontend, events_max=EVENTS)
        async with asyncio.TaskGroup() as group:
            group.create_task(client.come_back(pair.other))
            await until(lambda: len(client.ids) >= 2 * EVENTS)
            (await busy(pair)).kill()
        return whole

    whole = asyncio.run(scenario())

    assert client.whole == whole.whole
    assert [move["reason"] for moves in pair.other.all_moves().values() for move in moves] == ["DISCONNECTED"]


def test_answers_are_completed_that_are_resumed_while_they_move(start_plane: Start) -> None:
    """Their frontend dies when their worker has just died, or while they begin on the other one."""
    pair = asyncio.run(start_pair(start_plane, worker=("--lease=2",)))
    wholes = {name: ReturningClient(body) for name, body in pair.bodies.items()}
    clients = {name: ReturningClient(body) for name, body in pair.bodies.items()}

    async def scenario() -> None:
        await run_together(client.ask(pair.other) for client in wholes.values())
        async with asyncio.TaskGroup() as group:
            for client in clients.values():
                group.create_task(client.ask(pair.frontend))
            await until(lambda: all(len(client.ids) >= EVENTS for client in clients.values()))
            pair.workers[0].kill()
            await pair.frontend.logged("request moved")
            pair.frontend.kill()
        assert not all(client.has_ended for client in clients.values())
        await run_together(client.come_back_once_known(pair.other) for client in clients.values())

    asyncio.run(scenario())

    assert {name: client.whole for name, client in clients.items()} == {
        name: client.whole for name, client in wholes.items()
    }


@pytest.mark.parametrize("is_worker", [True, False], ids=["worker", "frontend"])
def test_answer_is_resumed_during_a_drain(pair: Pair, is_worker: bool) -> None:
    client = ReturningClient(PLAIN)

    async def scenario() -> ReturningClient:
        whole = await undisturbed(pair)
        await client.ask(pair.frontend, events_max=EVENTS)
        leaving = (await busy(pair)) if is_worker else pair.frontend
        leaving.signal(SIGTERM)
        await leaving.logged("draining")
        await client.come_back(pair.other)
        await until(lambda: leaving.status() is not None)
        assert leaving.status() == 0
        return whole

    assert asyncio.run(scenario()).whole == client.whole


def test_stream_of_a_frontend_that_drains_is_taken_over_at_once(pair: Pair) -> None:
    client = ReturningClient(PLAIN)

    async def scenario() -> tuple[ReturningClient, ReturningClient]:
        whole = await undisturbed(pair)
        async with asyncio.TaskGroup() as group:
            group.create_task(client.ask(pair.frontend))
            await until(lambda: len(client.ids) >= EVENTS)
            pair.frontend.signal(SIGTERM)
            await pair.frontend.logged("draining")
            second = await client.twin().come_back(pair.other)
        return whole, second

    whole, second = asyncio.run(scenario())

    assert second.whole == whole.whole
    assert client.error is not None
    assert client.error["code"] == "TAKEN_OVER"


def test_answer_that_has_finished_meanwhile_is_there_streamed_and_whole(start_plane: Start) -> None:
    pair = asyncio.run(start_pair(start_plane))
    wholes = {name: ReturningClient(body) for name, body in pair.bodies.items()}
    clients = {name: ReturningClient(body) for name, body in pair.bodies.items()}

    async def scenario() -> dict[str, Any]:
        await run_together(client.ask(pair.other) for client in wholes.values())
        await run_together(client.ask(pair.frontend, events_max=EVENTS) for client in clients.values())
        await wait_idle(*pair.workers, pair.frontend)
        bodies = {name: await whole_of(pair.other, client.generation_id) for name, client in clients.items()}
        await run_together(client.come_back(pair.other) for client in clients.values())
        return bodies

    bodies = asyncio.run(scenario())

    for name, client in clients.items():
        assert client.whole == wholes[name].whole, name
        assert bodies[name] == client.whole[:2], name
