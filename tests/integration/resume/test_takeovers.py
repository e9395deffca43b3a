"""The client that comes back last gets the answer, whatever happens to its worker meanwhile.

| workload | nemesis | checker |
| --- | --- | --- |
| two clients of each kind with the same cursor | both come back at once | one has `whole`, the other TAKEN_OVER |
| resumed streams of each kind | SIGKILL of a worker | `whole` |
| streams of each kind | SIGKILL of a worker while they are resumed | `whole` |
| the same, on a worker that drains | their clients come back elsewhere | `whole` |
| the same, on a frontend that drains | the same; the old streams end TAKEN_OVER | `whole` |
| answers that have finished | their clients come back, streamed or whole | `whole` |
"""

import asyncio
from signal import SIGTERM
from typing import Any

import pytest

from tests.integration.conftest import Start
from tests.integration.harness.clients.returning import Returning, ReturningClient, whole_of
from tests.integration.harness.clients.send import run_together
from tests.integration.harness.metrics import wait_idle
from tests.integration.harness.plane.processes import Process
from tests.integration.harness.waiting import until
from tests.integration.resume.conftest import Pair, start_pair, wholes

EVENTS = 5


@pytest.fixture
def slow_pair(start_plane: Start) -> Pair:
    """Answers take 7 s: they are still under way when dozens of clients have done something, one after the other."""
    return asyncio.run(start_pair(start_plane, worker=("--mocker-itl-ms=110",)))


async def undisturbed(pair: Pair) -> dict[str, Returning]:
    clients = pair.clients()
    await run_together(client.ask(pair.other) for client in clients.values())
    return clients


async def leave(pair: Pair) -> dict[str, Returning]:
    """Clients that have some events each, and no connection."""
    clients = pair.clients()
    await run_together(client.ask(pair.frontend, events_max=EVENTS) for client in clients.values())
    return clients


async def begin(group: asyncio.TaskGroup, pair: Pair) -> dict[str, Returning]:
    """Clients that have some events each, and read on."""
    clients = pair.clients()
    for client in clients.values():
        group.create_task(client.ask(pair.frontend))
    await until(lambda: all(len(client.ids) >= EVENTS or client.has_ended for client in clients.values()))
    return clients


async def busy(pair: Pair) -> Process:
    """A worker that runs something."""

    async def found() -> Process | None:
        loads = [await worker.metric("dynamo_engine_request") for worker in pair.workers]
        return next((worker for worker, load in zip(pair.workers, loads, strict=True) if load), None)

    worker: Process = await until(found)
    return worker


def test_of_two_resumes_at_once_one_has_the_answer_and_the_other_is_told(pair: Pair) -> None:
    """They come back to two frontends. If one has all of an answer before the other asks, both have all of it."""

    async def scenario() -> tuple[dict[str, Returning], dict[str, Returning], dict[str, Returning]]:
        whole, firsts = await undisturbed(pair), await leave(pair)
        seconds = {name: client.twin() for name, client in firsts.items()}
        both = [(one, pair.frontend) for one in firsts.values()] + [(one, pair.other) for one in seconds.values()]
        await run_together(client.come_back_unless_taken(frontend) for client, frontend in both)
        await wait_idle(*pair.workers, pair.frontend, pair.other)
        return whole, firsts, seconds

    whole, firsts, seconds = asyncio.run(scenario())

    told = 0
    for name, first in firsts.items():
        ended = [client for client in (first, seconds[name]) if client.has_ended]
        assert ended, name
        assert all(client.whole == whole[name].whole for client in ended), name
        for client in (first, seconds[name]):
            if not client.has_ended:
                told += 1
                assert client.error is not None, name
                assert client.error["code"] == "TAKEN_OVER"
    assert told


def test_resumed_answers_move_when_their_worker_is_killed(slow_pair: Pair) -> None:
    pair = slow_pair

    async def scenario() -> tuple[dict[str, Returning], dict[str, Returning]]:
        whole, clients = await undisturbed(pair), await leave(pair)
        async with asyncio.TaskGroup() as group:
            for client in clients.values():
                group.create_task(client.come_back(pair.other))
            await until(lambda: all(len(client.ids) > EVENTS or client.has_ended for client in clients.values()))
            pair.workers[0].kill()
        return whole, clients

    whole, clients = asyncio.run(scenario())

    assert wholes(clients) == wholes(whole)
    assert {move["reason"] for moves in pair.other.all_moves().values() for move in moves} == {"DISCONNECTED"}


def test_answers_are_completed_that_are_resumed_while_they_move(start_plane: Start) -> None:
    """Their frontend dies when their worker has just died, or while they begin on the other one."""
    pair = asyncio.run(start_pair(start_plane, worker=("--lease=2",)))

    async def scenario() -> tuple[dict[str, Returning], dict[str, Returning]]:
        whole = await undisturbed(pair)
        async with asyncio.TaskGroup() as group:
            clients = await begin(group, pair)
            pair.workers[0].kill()
            await pair.frontend.logged("request moved")
            pair.frontend.kill()
        assert not all(client.has_ended for client in clients.values())
        await run_together(client.come_back_once_known(pair.other) for client in clients.values())
        return whole, clients

    whole, clients = asyncio.run(scenario())

    assert wholes(clients) == wholes(whole)


@pytest.mark.parametrize("is_worker", [True, False], ids=["worker", "frontend"])
def test_answers_are_resumed_during_a_drain(slow_pair: Pair, is_worker: bool) -> None:
    """A worker waits for answers that run, and takes those along that have ended: see the decision record."""
    pair = slow_pair

    async def scenario() -> tuple[dict[str, Returning], dict[str, Returning]]:
        whole, clients = await undisturbed(pair), await leave(pair)
        leaving = (await busy(pair)) if is_worker else pair.frontend
        leaving.signal(SIGTERM)
        await leaving.logged("draining")
        await run_together(client.come_back(pair.other) for client in clients.values())
        await until(lambda: leaving.status() is not None)
        assert leaving.status() == 0
        return whole, clients

    whole, clients = asyncio.run(scenario())

    assert wholes(clients) == wholes(whole)


def test_streams_of_a_frontend_that_drains_are_taken_over_at_once(slow_pair: Pair) -> None:
    pair = slow_pair

    async def scenario() -> tuple[dict[str, Returning], dict[str, Returning], dict[str, Returning]]:
        whole = await undisturbed(pair)
        async with asyncio.TaskGroup() as group:
            clients = await begin(group, pair)
            pair.frontend.signal(SIGTERM)
            await pair.frontend.logged("draining")
            seconds = {name: client.twin() for name, client in clients.items()}
            await run_together(second.come_back(pair.other) for second in seconds.values())
        return whole, clients, seconds

    whole, clients, seconds = asyncio.run(scenario())

    assert wholes(seconds) == wholes(whole)
    assert {(client.error or {}).get("code") for client in clients.values() if not client.has_ended} == {"TAKEN_OVER"}


def test_answer_that_has_finished_meanwhile_is_there_streamed_and_whole(pair: Pair) -> None:
    async def scenario() -> tuple[dict[str, Returning], dict[str, Returning], dict[str, Any]]:
        whole, clients = await undisturbed(pair), await leave(pair)
        await wait_idle(*pair.workers, pair.frontend)
        over_http = {name: client for name, client in clients.items() if isinstance(client, ReturningClient)}
        bodies = {name: await whole_of(pair.other, client.generation_id) for name, client in over_http.items()}
        await run_together(client.come_back(pair.other) for client in clients.values())
        return whole, clients, bodies

    whole, clients, bodies = asyncio.run(scenario())

    assert wholes(clients) == wholes(whole)
    assert bodies == {name: clients[name].whole[:2] for name in bodies}
