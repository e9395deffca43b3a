"""A frontend that dies costs clients that come back nothing, and the engines no work.

| workload | nemesis | checker |
| --- | --- | --- |
| a stream of each kind | SIGKILL of its frontend, one of two | `whole`, and what the engines computed |
| streams in both processes of `--processes 2` | SIGKILL of one | `whole` |
| streams | SIGSTOP of their frontend, and SIGCONT after the resumes | `whole`; the old streams end TAKEN_OVER |
| streams with token ids, several prompts included | SIGKILL of their frontend and of a worker at once | `whole` |
| the same | SIGKILL of all processes, and a new plane | `whole`, without ids |

`whole` is text, token ids, log probabilities, finish reasons and usage, as undisturbed.
"""

import asyncio
import os
from collections.abc import Mapping
from signal import SIGCONT, SIGKILL, SIGSTOP
from typing import Any

import pytest

from tests.integration.conftest import Start
from tests.integration.harness.clients.answers import Refused
from tests.integration.harness.clients.returning import ReturningClient
from tests.integration.harness.clients.send import run_together
from tests.integration.harness.metrics import wait_idle
from tests.integration.harness.plane.processes import Frontend, children
from tests.integration.harness.waiting import until
from tests.integration.resume.conftest import PACE, PLAIN, TOKENS, Pair, start_pair

CONNECTIONS = 16
"""Each ends in either process. All end in the same process with a probability of 1 in 2^15."""
EVENTS = 5
"""How many each client has when the frontend dies."""


def clients_of(bodies: Mapping[str, dict[str, Any]]) -> dict[str, ReturningClient]:
    return {name: ReturningClient(body) for name, body in bodies.items()}


def wholes(clients: Mapping[str, ReturningClient]) -> dict[str, Any]:
    return {name: client.whole for name, client in clients.items()}


@pytest.mark.parametrize("has_stops", [False, True])
def test_every_kind_of_answer_is_completed_on_the_other_frontend(pair: Pair, has_stops: bool) -> None:
    """With stop strings, an engine is told late to stop, so that its count of tokens differs from time to time."""
    bodies = {name: body for name, body in pair.bodies.items() if (body.get("stop") is not None) == has_stops}
    undisturbed, clients = clients_of(bodies), clients_of(bodies)

    async def scenario() -> list[tuple[float, float]]:
        seen = await tokens_around(pair, undisturbed)
        async with asyncio.TaskGroup() as group:
            await begin(group, clients, pair.frontend)
            pair.frontend.kill()
        assert not all(client.has_ended for client in clients.values())
        await run_together(client.come_back(pair.other) for client in clients.values())
        await wait_idle(*pair.workers, pair.other)
        seen.append(await pair.computed.tokens())
        return seen

    before, between, after = asyncio.run(scenario())

    assert wholes(clients) == wholes(undisturbed)
    if not has_stops:
        assert cost(between, after) == cost(before, between)


async def tokens_around(pair: Pair, undisturbed: Mapping[str, ReturningClient]) -> list[tuple[float, float]]:
    """Let clients have their answers undisturbed. Returns what the engines have computed before and after that."""
    before = await pair.computed.tokens()
    await run_together(client.ask(pair.other) for client in undisturbed.values())
    await wait_idle(*pair.workers)
    return [before, await pair.computed.tokens()]


async def begin(group: asyncio.TaskGroup, clients: Mapping[str, ReturningClient], frontend: Frontend) -> None:
    """Start the answers, and wait until each client has a part of its own."""
    for client in clients.values():
        group.create_task(client.ask(frontend))
    await until(lambda: all(len(client.ids) >= EVENTS for client in clients.values()))


def cost(before: tuple[float, float], after: tuple[float, float]) -> tuple[float, float]:
    """The prompt tokens and the tokens that the engines have computed in between."""
    return after[0] - before[0], after[1] - before[1]


def test_streams_of_a_killed_process_are_completed_by_those_that_are_left(start_plane: Start) -> None:
    plane = start_plane(frontend=("--processes=2",))
    clients = [ReturningClient(PLAIN) for _ in range(CONNECTIONS)]

    async def scenario() -> ReturningClient:
        worker = await plane.worker(PACE)
        instance = worker.ready["instance_id"]
        await until(lambda: len(plane.frontend.events("worker found", instance=instance)) == 2)
        undisturbed = await ReturningClient(PLAIN).ask(plane.frontend)
        async with asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(ask_and_come_back(client, plane.frontend))
            await until(lambda: all(len(client.ids) >= EVENTS for client in clients))
            os.kill(children(plane.frontend)[0], SIGKILL)
        assert await worker.metric("unbroken_engine_generated_tokens_total") == TOKENS * (CONNECTIONS + 1)
        return undisturbed

    undisturbed = asyncio.run(scenario())

    assert all(client.whole == undisturbed.whole for client in clients)


async def ask_and_come_back(client: ReturningClient, frontend: Frontend) -> None:
    await client.ask(frontend)
    await client.come_back_once_known(frontend)


def test_frontend_that_was_frozen_finds_its_streams_taken(pair: Pair) -> None:
    bodies = {name: body for name, body in pair.bodies.items() if body.get("stop") is None}
    undisturbed, clients = clients_of(bodies), clients_of(bodies)
    twins: dict[str, ReturningClient] = {}

    async def scenario() -> list[tuple[float, float]]:
        seen = await tokens_around(pair, undisturbed)
        async with asyncio.TaskGroup() as group:
            await begin(group, clients, pair.frontend)
            pair.frontend.signal(SIGSTOP)
            twins.update({name: client.twin() for name, client in clients.items()})
            await run_together(twin.come_back(pair.other) for twin in twins.values())
            await wait_idle(*pair.workers)
            pair.frontend.signal(SIGCONT)
        seen.append(await pair.computed.tokens())
        return seen

    before, between, after = asyncio.run(scenario())

    assert wholes(twins) == wholes(undisturbed)
    assert {(client.error or {}).get("code") for client in clients.values() if not client.has_ended} == {"TAKEN_OVER"}
    for name, client in clients.items():
        for index, choice in client.choices.items():
            assert undisturbed[name].choices[index].text.startswith(choice.text)
    assert cost(between, after) == cost(before, between)


def test_answers_are_completed_when_their_frontend_and_a_worker_die_at_once(start_plane: Start) -> None:
    pair = asyncio.run(start_pair(start_plane, worker=("--lease=2",)))
    bodies = {name: body for name, body in pair.bodies.items() if body.get("return_token_ids")}
    undisturbed, clients = clients_of(bodies), clients_of(bodies)
    ways: dict[str, str] = {}

    async def complete(name: str, client: ReturningClient) -> None:
        try:
            await client.come_back_once_known(pair.other)
            ways[name] = "resumed"
        except Refused as refused:
            ways[name] = refused.reason
            await client.go_on(pair.other)

    async def scenario() -> None:
        await run_together(client.ask(pair.other) for client in undisturbed.values())
        async with asyncio.TaskGroup() as group:
            await begin(group, clients, pair.frontend)
            pair.frontend.kill()
            pair.workers[0].kill()
        await run_together(complete(name, client) for name, client in clients.items())

    asyncio.run(scenario())

    assert set(ways.values()) == {"resumed", "STREAM_NOT_FOUND"}
    assert ways["several prompts with token ids"] == "resumed", "the other worker had some of its choices"
    check_without_ids(clients, undisturbed)


def check_without_ids(clients: Mapping[str, ReturningClient], undisturbed: Mapping[str, ReturningClient]) -> None:
    """Log probabilities of tokens whose text was held back at the cut are lost if nobody but the client has them."""
    for name, client in clients.items():
        (got, usage, _), (expected, expected_usage, _) = client.whole, undisturbed[name].whole
        essence = {index: (one.text, one.token_ids, one.finish) for index, one in got.items()}
        assert essence == {index: (one.text, one.token_ids, one.finish) for index, one in expected.items()}, name
        assert usage == expected_usage, name


def test_clients_with_their_tokens_outlive_the_whole_plane(start_plane: Start) -> None:
    pair = asyncio.run(start_pair(start_plane))
    bodies = {name: body for name, body in pair.bodies.items() if body.get("return_token_ids")}
    undisturbed, clients = clients_of(bodies), clients_of(bodies)

    async def scenario() -> None:
        await run_together(client.ask(pair.other) for client in undisturbed.values())
        async with asyncio.TaskGroup() as group:
            await begin(group, clients, pair.frontend)
            for process in pair.plane.processes:
                process.kill()
        anew = start_plane()
        await anew.worker(PACE)
        with pytest.raises(Refused, match="STREAM_NOT_FOUND"):
            await clients["greedy with token ids"].come_back(anew.frontend)
        await run_together(client.go_on(anew.frontend) for client in clients.values())

    asyncio.run(scenario())

    check_without_ids(clients, undisturbed)
