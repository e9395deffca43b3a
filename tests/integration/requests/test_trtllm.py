"""What is special about a worker with TensorRT-LLM: its engine may die, and it cannot serve every request.

| workload | nemesis | checker |
| --- | --- | --- |
| streams | their engine dies at exact positions, in several ways | `Answer`, moved there; exit 1 if noticed |
| 12 streams | a prompt that kills any engine | POISON_REQUEST after two deaths; `Answer` |
| the same | a request on which the engine fails, before or after its first token | ENGINE_ERROR, for it alone |
| a guided stream, and a sampled one with `exact` | SIGKILL of their worker | the worker's failure, after the tokens |
| fields that the engine would ignore, unreadable grammars | – | INVALID_ARGUMENT with the field; `Answer` |
| grammars | – | the answer fits |
| streams | – | frontends know the blocks they use |
"""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace

import grpc
import pytest

from services.stubs.registry_pb2 import ListRequest
from services.stubs.registry_pb2_grpc import RegistryStub
from tests.integration.conftest import Start, on_trtllm
from tests.integration.harness.clients.answers import Answer, Refused
from tests.integration.harness.clients.client import ENDLESS, Client
from tests.integration.harness.clients.requests import PROTOCOLS, Request
from tests.integration.harness.clients.send import (
    answer,
    answers_under_fault,
    move_reasons,
    outcome,
    refusal,
    run_together,
)
from tests.integration.harness.metrics import read_metrics, wait_idle
from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.waiting import until

pytestmark = on_trtllm

ITL = "--mocker-itl-ms=5"
GUIDED = "--guided-decoding-backend=xgrammar"
GREEDY = Request("grpc", max_tokens=80)
SAMPLED = replace(GREEDY, temperature=0.8, seed=None)
ASKS = [
    Request(PROTOCOLS[number % 3], is_chat=number % 2 == 0, prompt=f"Stream {number}", max_tokens=100)
    for number in range(12)
]
BELL, RINGING = 7, "ring \a the bell"
"""A token to which faults are bound. The model's tokens are bytes."""


# An engine that dies

WARM_UP_STEPS = 1
ENGINE_STALL = "--engine-stall-ms=3000"
"""Longer than the worker needs to notice the death itself, if it can."""


@dataclass(frozen=True)
class Death:
    """`variables`: of the fake. `reason`: why streams move. `is_noticed`: whether the process notices and soon ends."""

    variables: dict[str, str]
    reason: str = "ENGINE_DEAD"
    positions: tuple[int, ...] = (0, 1, 40)
    is_noticed: bool = True


DEATHS = {
    "the next call raises its error": Death({"TLLM_FAKE_DEATH": "stored"}),
    "its error is raised": Death({"TLLM_FAKE_DEATH": "raised"}),
    "it reports nothing": Death({"TLLM_FAKE_DEATH": "silent"}, "STALLED", positions=(1, 40), is_noticed=False),
    "it blocks the event loop": Death({"TLLM_FAKE_SHUTDOWN": "hangs"}, "STALLED", is_noticed=False),
}


@pytest.mark.parametrize("death", DEATHS.values(), ids=DEATHS)
def test_streams_of_a_dead_engine_move(start_plane: Start, death: Death) -> None:
    plane = start_plane(frontend=(ENGINE_STALL,))

    async def die_at(position: int, undisturbed: Answer) -> None:
        name = f"--served-model-name=dies-{position}"
        request = replace(GREEDY, model=f"dies-{position}", request_id=f"dies-{position}")
        steps = {"TLLM_FAKE_DEATH_STEPS": str(WARM_UP_STEPS + position + 1)}
        dying = await plane.worker(ITL, name, environment={**death.variables, **steps})
        async with asyncio.TaskGroup() as group:
            task = group.create_task(answer(plane.frontend, request))
            await until(lambda: is_in_flight(plane, request.model))  # The worker itself may have ended by now.
            await plane.worker(ITL, name)
        assert task.result() == undisturbed
        (move,) = plane.frontend.moves(request.request_id)
        assert move["reason"] == death.reason
        assert move["position"] <= position  # The last token may be lost with the worker, and is sampled again.
        if death.is_noticed:
            await until(lambda: dying.status() == 1)
            assert dying.ready["instance_id"] not in await registered(plane)

    async def scenario() -> None:
        await plane.worker(ITL)
        undisturbed = await answer(plane.frontend, GREEDY)
        await run_together(die_at(position, undisturbed) for position in death.positions)

    asyncio.run(scenario())


async def is_in_flight(plane: Plane, model: str) -> bool:
    return await plane.frontend.metric("dynamo_frontend_inflight_requests", model=model) == 1


async def registered(plane: Plane) -> set[str]:
    """Return the ids of all registered instances."""
    async with grpc.aio.insecure_channel(plane.registry_address) as channel:
        listed = await RegistryStub(channel).List(ListRequest())
    return {instance.instance_id for instance in listed.instances}


def test_request_that_kills_every_engine_stops_after_two(start_plane: Start) -> None:
    plane = start_plane()
    deadly = {"TLLM_FAKE_DEATH_TOKEN": str(BELL)}

    async def scenario() -> Answer | Refused:
        workers = [await plane.worker(ITL, environment=deadly) for _ in range(3)]
        undisturbed = await run_together(answer(plane.frontend, request) for request in ASKS)
        refusals = []

        async def poison() -> None:
            refusals.append(await outcome(plane.frontend, Request("stream", prompt=RINGING)))

        assert await answers_under_fault(plane.frontend, ASKS, poison) == undisturbed
        await until(lambda: sorted(worker.status() or 0 for worker in workers) == [0, 1, 1])
        return refusals[0]

    refused = asyncio.run(scenario())
    assert isinstance(refused, Refused)
    assert refused.reason == "POISON_REQUEST"


# Requests on which the engine fails


@pytest.fixture(scope="module")
def plane(start_plane: Start) -> Iterator[Plane]:
    """Workers whose engines fail on a certain token, and that support guided decoding."""
    plane = start_plane()

    async def start() -> None:
        for after in (0, 5):
            fails = {"TLLM_FAKE_ERROR_TOKEN": str(BELL), "TLLM_FAKE_ERROR_AFTER": str(after)}
            name = f"--served-model-name=fails-after-{after}"
            await plane.worker(ITL, GUIDED, name, environment=fails)
            await plane.worker(ITL, GUIDED, name, environment=fails)
        await plane.worker(ITL, GUIDED)

    asyncio.run(start())
    yield plane
    assert not plane.frontend.events_until_now("worker lost")
    assert not plane.frontend.events_until_now(level="error")


@pytest.mark.parametrize("after", [0, 5])
def test_request_that_the_engine_fails_on_fails_alone(plane: Plane, after: int) -> None:
    model = f"fails-after-{after}"
    requests = [replace(request, model=model) for request in ASKS]

    async def scenario() -> None:
        undisturbed = await run_together(answer(plane.frontend, request) for request in requests)

        async def fail() -> None:
            for protocol in PROTOCOLS:
                refused = await refusal(plane.frontend, Request(protocol, model=model, prompt=RINGING))
                assert refused is not None
                assert refused.reason == "ENGINE_ERROR"
                assert bool(refused.received) == (after > 0 and protocol != "unary")

        assert await answers_under_fault(plane.frontend, requests, fail) == undisturbed
        assert move_reasons(plane.frontend, requests) == [[]] * len(requests)
        await wait_idle(plane.frontend)

    asyncio.run(scenario())


# Requests that the engine cannot serve

IGNORED = {
    "seed": replace(SAMPLED, seed=7),
    "presence_penalty": replace(GREEDY, presence_penalty=0.5),
    "frequency_penalty": replace(GREEDY, frequency_penalty=0.5),
    "repetition_penalty": replace(GREEDY, repetition_penalty=1.2),
    "min_tokens": replace(GREEDY, min_tokens=5, stop_token_ids=(97,)),
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_field_that_the_engine_would_ignore_is_refused_by_name(plane: Plane, protocol: str) -> None:
    async def scenario() -> None:
        undisturbed = await answer(plane.frontend, GREEDY)
        for name, request in IGNORED.items():
            refused = await refusal(plane.frontend, replace(request, protocol=protocol))
            assert refused is not None, name
            assert refused.code in ("INVALID_ARGUMENT", 400)
            assert (refused.reason, refused.metadata["param"]) == ("INVALID_ARGUMENT", name)
        assert await answer(plane.frontend, GREEDY) == undisturbed

    asyncio.run(scenario())


def test_sampled_answers_differ_and_are_complete(plane: Plane) -> None:
    async def scenario() -> None:
        answers = await run_together(answer(plane.frontend, replace(SAMPLED, protocol=one)) for one in PROTOCOLS * 2)
        assert {one.completion_tokens for one in answers} == {SAMPLED.max_tokens}
        assert len({one.text for one in answers}) > 1

    asyncio.run(scenario())


# Guided decoding

SCHEMA = {
    "type": "object",
    "properties": {"numbers": {"type": "array", "items": {"type": "integer"}, "minItems": 6, "maxItems": 6}},
    "required": ["numbers"],
    "additionalProperties": False,
}
UNREADABLE = {"type": "no such type"}
GUIDED_FIELDS = {"grpc": "guided", "stream": "guided_json", "unary": "guided_json"}
JSON = Request(prompt="As JSON:", max_tokens=500, ignore_eos=False, json_schema=json.dumps(SCHEMA))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_guided_answer_fits_its_grammar_and_an_unreadable_grammar_is_a_client_error(
    plane: Plane, protocol: str
) -> None:
    async def scenario() -> None:
        got = await answer(plane.frontend, replace(JSON, protocol=protocol))
        assert len(json.loads(got.text)["numbers"]) == 6
        assert got.finish == "stop"
        unreadable = replace(JSON, protocol=protocol, json_schema=json.dumps(UNREADABLE))
        refused = await refusal(plane.frontend, unreadable)
        assert refused is not None
        assert (refused.reason, refused.metadata["param"]) == ("INVALID_ARGUMENT", GUIDED_FIELDS[protocol])

    asyncio.run(scenario())


SAMPLED_STAYS = pytest.param(("--resume-sampling=exact",), SAMPLED, id="sampled, where only exact answers move")


@pytest.mark.parametrize("protocol", ["grpc", "stream"])
@pytest.mark.parametrize(("options", "irreproducible"), [SAMPLED_STAYS, pytest.param((), JSON, id="guided")])
def test_stream_that_cannot_move_fails_and_keeps_what_was_delivered(
    start_plane: Start, options: tuple[str, ...], irreproducible: Request, protocol: str
) -> None:
    """The alternative would be to continue as a different answer."""
    plane = start_plane(frontend=options)

    async def scenario() -> None:
        victim = await plane.worker("--mocker-itl-ms=200", GUIDED)
        async with asyncio.TaskGroup() as group:
            client = Client(plane.frontend, replace(irreproducible, protocol=protocol, max_tokens=ENDLESS)).start(group)
            await until(lambda: client.has_begun)
            await plane.worker(GUIDED)
            victim.kill()
            refused = await client.refusal()
        assert refused.reason == "DISCONNECTED"
        assert refused.received

    asyncio.run(scenario())
    assert not plane.frontend.events_until_now("request moved")


# Load


def test_frontend_reports_the_cache_blocks_of_running_requests(start_plane: Start) -> None:
    plane = start_plane()

    async def scenario() -> None:
        worker = await plane.worker(ITL)
        async with asyncio.TaskGroup() as group:
            clients = [Client(plane.frontend, Request("grpc", prompt="p" * 320, max_tokens=ENDLESS)) for _ in range(2)]
            for client in clients:
                client.start(group)
            await until(lambda: holds(plane, 2 * 320 // 32))
            for client in clients:
                client.hang_up()
        await wait_idle(worker, plane.frontend)

    asyncio.run(scenario())


async def holds(plane: Plane, blocks: int) -> bool:
    return (await read_metrics(plane.frontend)).sum("dynamo_frontend_worker_active_decode_blocks") >= blocks
