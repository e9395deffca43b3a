"""A client whose connection is cut at any event comes back for the rest.

| workload | nemesis | checker |
| --- | --- | --- |
| streams of each kind, over either protocol | RST after 0 to 63 events | `whole`; no prompt computed twice |
| one stream | RST after each event | `whole` |
| a request with an id of the client's | RST before the head of the response | `whole` |
| a stream | RST; then the same POST with the ids | `whole` |
"""

import asyncio
import uuid
from collections.abc import Mapping
from typing import Any

import pytest

from tests.integration.conftest import Start
from tests.integration.harness.clients.cases import CASES, STOPS
from tests.integration.harness.clients.requests import Request, json_body
from tests.integration.harness.clients.returning import CONTINUE, Returning, ReturningClient, whole_of
from tests.integration.harness.clients.send import answer, run_together
from tests.integration.harness.metrics import read_metrics, wait_idle
from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.plane.processes import Frontend, Process
from tests.integration.harness.waiting import until
from tests.integration.resume.conftest import OTHERS, PLAIN, TOKENS, kinds_of

KINDS = (*CASES, *STOPS, *OTHERS)
SHARE = 4
"""Each kind is cut at every fourth position, and its neighbours at the others: all would take minutes."""
SLOW = "--mocker-itl-ms=40"


@pytest.fixture(scope="module")
def worker(plane: Plane) -> Process:
    return asyncio.run(plane.worker("--mocker-itl-ms=3"))


@pytest.fixture(scope="module")
def kinds(plane: Plane, worker: Process) -> Mapping[str, Returning]:
    return asyncio.run(kinds_of(plane.frontend))


def cuts() -> list[tuple[str, range]]:
    """Kinds with the positions at which they are cut: all positions in each form of each protocol."""
    forms = ("{}", "{} with token ids", "{} over gRPC")
    return [
        (form.format(name), range(number % SHARE, TOKENS, SHARE))
        for form in forms
        for number, name in enumerate(KINDS)
        if not (name in OTHERS and form == "{} over gRPC")
    ]


@pytest.mark.parametrize(("kind", "positions"), cuts(), ids=lambda value: value if isinstance(value, str) else "")
def test_answer_is_completed_wherever_its_connection_is_reset(
    plane: Plane, worker: Process, kinds: Mapping[str, Returning], kind: str, positions: range
) -> None:
    clients = {count: kinds[kind].anew() for count in positions}

    async def cut_after(count: int) -> None:
        await clients[count].ask(plane.frontend, events_max=count)
        if not clients[count].has_ended:
            await clients[count].come_back(plane.frontend)

    async def scenario() -> tuple[Returning, float, float]:
        start = (await read_metrics(worker)).prompt_tokens
        undisturbed = await kinds[kind].anew().ask(plane.frontend)
        one = (await read_metrics(worker)).prompt_tokens
        await run_together(cut_after(count) for count in positions)
        await wait_idle(worker, plane.frontend)
        return undisturbed, one - start, (await read_metrics(worker)).prompt_tokens - one

    undisturbed, prompt_tokens, all_prompt_tokens = asyncio.run(scenario())

    for count, client in clients.items():
        assert client.whole == undisturbed.whole, f"cut after {count} events"
    assert all_prompt_tokens == len(positions) * prompt_tokens


def test_answer_is_completed_although_its_connection_is_reset_after_every_event(plane: Plane, worker: Process) -> None:
    async def scenario() -> tuple[ReturningClient, ReturningClient]:
        client = await ReturningClient(PLAIN).ask(plane.frontend, events_max=1)
        while client.choices[0].finish is None:
            await client.come_back(plane.frontend, events_max=1)
        await client.come_back(plane.frontend)
        return client, await ReturningClient(PLAIN).ask(plane.frontend)

    client, undisturbed = asyncio.run(scenario())

    assert client.whole == undisturbed.whole


def test_request_that_is_sent_again_with_its_ids_is_resumed(plane: Plane, worker: Process) -> None:
    async def scenario() -> tuple[ReturningClient, ReturningClient]:
        client = await ReturningClient(PLAIN).ask(plane.frontend, events_max=9)
        before = await worker.metric("unbroken_engine_prefill_tokens_total")
        await client.repeat(plane.frontend)
        assert await worker.metric("unbroken_engine_prefill_tokens_total") == before
        return client, await ReturningClient(PLAIN).ask(plane.frontend)

    client, undisturbed = asyncio.run(scenario())

    assert client.whole == undisturbed.whole


@pytest.mark.parametrize("form", [str, lambda one: one.hex], ids=["uuid", "hex"])
@pytest.mark.parametrize("is_streamed", [True, False])
def test_client_that_chose_the_id_comes_back_without_having_got_anything(
    start_plane: Start, form: Any, is_streamed: bool
) -> None:
    plane, request_id = start_plane(), form(uuid.uuid4())
    headers = {**CONTINUE, "X-Request-Id": request_id}
    client = ReturningClient(json_body(Request()), headers, generation_id=request_id)

    async def scenario() -> None:
        worker = await plane.worker(SLOW)
        await send_and_reset(plane.frontend, client, worker, is_streamed=is_streamed)
        await client.come_back(plane.frontend, Accept="text/event-stream")
        choices, usage = await whole_of(plane.frontend, request_id)
        assert (choices, usage) == client.whole[:2]
        assert await worker.metric("unbroken_engine_generated_tokens_total") == Request().max_tokens

    asyncio.run(scenario())


async def send_and_reset(frontend: Frontend, client: ReturningClient, worker: Process, *, is_streamed: bool) -> None:
    """Send the request, and cut the connection, without reading from it, once the engine has the request."""
    async with asyncio.TaskGroup() as group:
        request = Request("stream" if is_streamed else "unary", headers=client.headers)
        asking = group.create_task(answer(frontend, request))
        await until(lambda: is_running(worker))
        asking.cancel()
    await until(lambda: has_detached(worker))


async def is_running(worker: Process) -> bool:
    return await worker.metric("dynamo_engine_request") == 1


async def has_detached(worker: Process) -> bool:
    return await worker.metric("unbroken_detached_requests") == 1
