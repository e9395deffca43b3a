"""A frontend that dies costs clients that come back nothing, and the engines no work.

| workload | nemesis | checker |
| --- | --- | --- |
| each kind of stream, over either protocol | SIGKILL of its frontend, one of two | `whole`, what engines computed |
| the same, in both processes of `--processes 2` | SIGKILL of one | `whole` |
| the same | SIGSTOP of their frontend, and SIGCONT after the resumes | `whole`; the old streams end TAKEN_OVER |
| streams with token ids, several prompts included | SIGKILL of their frontend and of a worker at once | `whole` |
| the same | SIGKILL of all processes, and a new plane | `whole`, without ids |

`whole` is text, token ids, log probabilities, finish reasons and usage, as undisturbed.
"""

import asyncio
import os
from collections.abc import Mapping
from signal import SIGCONT, SIGKILL, SIGSTOP

import pytest

from tests.integration.conftest import Start
from tests.integration.harness.clients.answers import Refused
from tests.integration.harness.clients.returning import Returning
from tests.integration.harness.clients.send import run_together
from tests.integration.harness.metrics import wait_idle
from tests.integration.harness.plane.processes import Frontend, children
from tests.integration.harness.waiting import until
from tests.integration.resume.conftest import PACE, Computed, Pair, kinds_of, start_pair, wholes

EVENTS = 5
"""How many each client has when the frontend dies."""


def has_no_stop(client: Returning) -> bool:
    return not client.has_stop


def keeps_tokens(client: Returning) -> bool:
    return client.keeps_tokens


@pytest.mark.parametrize("has_stops", [False, True])
def test_every_kind_of_answer_is_completed_on_the_other_frontend(pair: Pair, has_stops: bool) -> None:
    """With stop strings, an engine is told late to stop, so that its count of tokens differs from time to time."""
    undisturbed, clients = [pair.clients(lambda one: one.has_stop == has_stops) for _ in range(2)]

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


async def tokens_around(pair: Pair, undisturbed: Mapping[str, Returning]) -> list[tuple[float, float]]:
    """Let clients have their answers undisturbed. Returns what the engines have computed before and after that."""
    before = await pair.computed.tokens()
    await run_together(client.ask(pair.other) for client in undisturbed.values())
    await wait_idle(*pair.workers)
    return [before, await pair.computed.tokens()]


async def begin(group: asyncio.TaskGroup, clients: Mapping[str, Returning], frontend: Frontend) -> None:
    """Start the answers, and wait until each client has a part of its own."""
    for client in clients.values():
        group.create_task(client.ask(frontend))
    await until(lambda: all(len(client.ids) >= EVENTS or client.has_ended for client in clients.values()))


def cost(before: tuple[float, float], after: tuple[float, float]) -> tuple[float, float]:
    """The prompt tokens and the tokens that the engines have computed in between."""
    return after[0] - before[0], after[1] - before[1]


def test_streams_of_a_killed_process_are_completed_by_those_that_are_left(start_plane: Start) -> None:
    """Each client's connection ends in either process, and there are dozens of them."""
    plane = start_plane(frontend=("--processes=2",))

    async def scenario() -> None:
        worker = await plane.worker(PACE)
        instance = worker.ready["instance_id"]
        await until(lambda: len(plane.frontend.events("worker found", instance=instance)) == 2)
        kinds = {name: one for name, one in (await kinds_of(plane.frontend)).items() if has_no_stop(one)}
        undisturbed, clients = [{name: one.anew() for name, one in kinds.items()} for _ in range(2)]
        before = await Computed([worker]).tokens()
        await run_together(client.ask(plane.frontend) for client in undisturbed.values())
        between = await Computed([worker]).tokens()
        async with asyncio.TaskGroup() as group:
            for client in clients.values():
                group.create_task(ask_and_come_back(client, plane.frontend))
            await until(lambda: all(len(client.ids) >= EVENTS or client.has_ended for client in clients.values()))
            os.kill(children(plane.frontend)[0], SIGKILL)
        assert wholes(clients) == wholes(undisturbed)
        assert cost(between, await Computed([worker]).tokens()) == cost(before, between)

    asyncio.run(scenario())


async def ask_and_come_back(client: Returning, frontend: Frontend) -> None:
    await client.ask(frontend)
    await client.come_back_once_known(frontend)


def test_frontend_that_was_frozen_finds_its_streams_taken(pair: Pair) -> None:
    undisturbed, clients = pair.clients(has_no_stop), pair.clients(has_no_stop)
    twins: dict[str, Returning] = {}

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
    undisturbed, clients = pair.clients(keeps_tokens), pair.clients(keeps_tokens)
    ways: dict[str, str] = {}

    async def complete(name: str, client: Returning) -> None:
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


def check_without_ids(clients: Mapping[str, Returning], undisturbed: Mapping[str, Returning]) -> None:
    """Log probabilities of tokens whose text was held back at the cut are lost if nobody but the client has them."""
    for name, client in clients.items():
        (got, usage, _), (expected, expected_usage, _) = client.whole, undisturbed[name].whole
        essence = {index: (one.text, one.token_ids, one.finish) for index, one in got.items()}
        assert essence == {index: (one.text, one.token_ids, one.finish) for index, one in expected.items()}, name
        assert client.is_partial or usage == expected_usage, name


def test_clients_with_their_tokens_outlive_the_whole_plane(start_plane: Start) -> None:
    pair = asyncio.run(start_pair(start_plane))
    undisturbed, clients = pair.clients(keeps_tokens), pair.clients(keeps_tokens)

    async def scenario() -> None:
        await run_together(client.ask(pair.other) for client in undisturbed.values())
        async with asyncio.TaskGroup() as group:
            await begin(group, clients, pair.frontend)
            for process in pair.plane.processes:
                process.kill()
        anew = start_plane()
        await anew.worker(PACE)
        with pytest.raises(Refused, match="STREAM_NOT_FOUND"):
            await next(client for client in clients.values() if not client.has_ended).come_back(anew.frontend)
        await run_together(client.go_on(anew.frontend) for client in clients.values())

    asyncio.run(scenario())

    check_without_ids(clients, undisturbed)
