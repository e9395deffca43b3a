"""A moved answer equals the unmoved one, for every kind of request, at every position, and for every kind of loss.

| workload | nemesis | checker |
| --- | --- | --- |
| all CASES at once, by gRPC, SSE and unary HTTP | SIGKILL at each of 64 positions | `Answer`, one move per choice |
| the same | SIGSTOP at 12 positions | `Answer`, one move per choice, for STALLED |
| the same | SIGTERM at 12 positions, with another worker | `Answer`, one move per choice, for DRAINING |

`Answer` is text, token ids, log probabilities, finish reason and usage. One worker serves all streams of a round. It
holds its first step until all of them have arrived, so all are at the same position when it is lost.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count

import grpc
import pytest

from services.rpc.status import CHANNEL_OPTIONS
from services.stubs import inference_pb2, inference_pb2_grpc
from tests.integration.conftest import Start
from tests.integration.harness.clients.answers import Answer
from tests.integration.harness.clients.cases import CASES, GREEDY, SEEDED, TOKENS, with_stops
from tests.integration.harness.clients.requests import PROTOCOLS, Request
from tests.integration.harness.clients.send import answer, run_together
from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.plane.processes import Process
from tests.integration.harness.waiting import until

POSITIONS = range(TOKENS)
SPREAD = (0, 1, *range(7, TOKENS - 2, 7), TOKENS - 2, TOKENS - 1)
REPEATS_MAX = 10
"""How often to repeat positions at which some kind was not cut: on a busy machine tokens may arrive late."""
LINGER_MS = 150
NUDGE_S_MAX = 10.0
FAST = "--mocker-itl-ms=1"
LEASE = "--lease=2"
AT_THE_LIMIT = "max_tokens at the cut"
"""The last token of this case is due when its worker is lost."""

Kind = tuple[str, str]
"""Case and protocol."""


@dataclass
class Setup:
    """A plane with a worker that no fault strikes, and that worker's answers."""

    plane: Plane
    cases: Mapping[str, Request] = field(default_factory=dict)
    expected: dict[tuple[Kind, int], Answer] = field(default_factory=dict)
    names: Iterator[int] = field(default_factory=count)

    def requests(self, position: int) -> dict[Kind, Request]:
        cases = {**self.cases, AT_THE_LIMIT: replace(GREEDY, max_tokens=position + 1)}
        return {(name, protocol): replace(cases[name], protocol=protocol) for name in cases for protocol in PROTOCOLS}

    def undisturbed(self, kind: Kind, position: int) -> Answer:
        return self.expected[kind, position if kind[0] == AT_THE_LIMIT else 0]

    async def collect_answers(self) -> None:
        """Send all requests without a fault."""
        await self.plane.worker(FAST)
        seeded = await answer(self.plane.frontend, replace(SEEDED, protocol="grpc"))
        self.cases = {**CASES, **with_stops(seeded)}
        for position in POSITIONS:
            requests = {
                kind: request
                for kind, request in self.requests(position).items()
                if not position or kind[0] == AT_THE_LIMIT
            }
            answers = await run_together(answer(self.plane.frontend, request) for request in requests.values())
            for kind, got in zip(requests, answers, strict=True):
                self.expected[kind, position if kind[0] == AT_THE_LIMIT else 0] = got


@pytest.fixture(scope="module")
def prepared(start_plane: Start) -> Setup:
    one = Setup(start_plane(frontend=("--stall-ms=3000",)))
    asyncio.run(one.collect_answers())
    return one


@dataclass(frozen=True)
class Fault:
    """A fault of the mocker, and the reason for which its streams move.

    `lanes`: how many rounds run at a time. `is_gentle`: streams may finish where they are.
    """

    fault: str
    reason: str
    lanes: int = 3
    itl_ms: int = 10
    is_gentle: bool = False


KILL = Fault("die_after", "DISCONNECTED")
FREEZE = Fault("freeze_after", "STALLED")
DRAIN = Fault("leave_after", "DRAINING", lanes=1, itl_ms=40, is_gentle=True)


@dataclass
class Survey:
    """The positions at which the streams of each kind have moved."""

    moved_at: dict[Kind, set[int]] = field(default_factory=lambda: defaultdict(set))

    def missing(self, prepared: Setup) -> set[int]:
        """Return the positions at which some kind has not been cut yet."""
        missing = set()
        for kind, positions in self.moved_at.items():
            whole = prepared.undisturbed(kind, 0)
            length = whole.completion_tokens // len(whole.choices)
            missing |= set(range(TOKENS if kind[0] == AT_THE_LIMIT else length)) - positions
        return missing


def test_all_protocols_give_the_same_answer(prepared: Setup) -> None:
    for (name, protocol), position in prepared.expected:
        ours, others = (prepared.expected[(name, one), position] for one in (protocol, "grpc"))
        assert ours.essence == others.essence


def test_cases_end_as_intended(prepared: Setup) -> None:
    ends = {name: prepared.undisturbed((name, "grpc"), 0) for name in prepared.cases}

    assert {name for name, got in ends.items() if got.choices[0].finish == "stop"} == {
        "stop string",
        "stop token",
        "min_tokens",
        "stop string after min_tokens",
    }
    assert ends["two choices"].completion_tokens == 2 * TOKENS
    assert ends["stop token"].completion_tokens >= TOKENS // 2
    assert TOKENS // 2 <= ends["min_tokens"].completion_tokens < TOKENS
    assert len(ends["logprobs"].only.logprobs) == TOKENS
    held_off = ends["stop string after min_tokens"]
    assert TOKENS // 2 < held_off.completion_tokens == len(held_off.only.logprobs) < TOKENS
    assert " " in held_off.text


def test_killed_worker_changes_no_answer_at_any_position(prepared: Setup) -> None:
    survey = Survey()

    async def scenario() -> None:
        await strike_at_positions(prepared, POSITIONS, KILL, survey)
        for _ in range(REPEATS_MAX):
            await strike_at_positions(prepared, sorted(survey.missing(prepared)), KILL, survey)

    asyncio.run(scenario())
    assert survey.missing(prepared) == set()


@pytest.mark.parametrize("fault", [FREEZE, DRAIN], ids=["frozen", "draining"])
def test_frozen_or_draining_worker_changes_no_answer(prepared: Setup, fault: Fault) -> None:
    survey = Survey()

    asyncio.run(strike_at_positions(prepared, SPREAD, fault, survey))

    unmoved = {name for name, protocol in prepared.requests(0) if not survey.moved_at[name, protocol]}
    assert unmoved <= {AT_THE_LIMIT}  # A stream with one token left may finish on its worker.


async def strike_at_positions(prepared: Setup, positions: Sequence[int], fault: Fault, survey: Survey) -> None:
    """Run one round for each position."""

    async def run_lane(share: Sequence[int]) -> None:
        for position in share:
            await strike(prepared, position, fault, survey)

    await run_together(run_lane(positions[lane :: fault.lanes]) for lane in range(fault.lanes))


async def strike(prepared: Setup, position: int, fault: Fault, survey: Survey) -> None:
    """Send all requests to a worker that is lost after this many tokens, with another beside it; check each answer."""
    plane, model = prepared.plane, f"{fault.fault}-{position}-{next(prepared.names)}"
    kinds = prepared.requests(position)
    requests = [request.named(f"{model}-{index}", model=model) for index, request in enumerate(kinds.values())]
    streams = sum(request.n for request in requests)
    faults = (f"{fault.fault}={position}", f"hold={streams + 1}", f"linger_ms={LINGER_MS}")
    options = (f"--mocker-itl-ms={fault.itl_ms}", *(f"--mocker-fault={fault}" for fault in faults))
    victim = await plane.worker(f"--served-model-name={model}", LEASE, *options)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(answer(plane.frontend, request)) for request in requests]
        await until(lambda: has_running(victim, streams))
        successor = await plane.worker(f"--served-model-name={model}", LEASE, FAST)
        await release_first_step(victim, model)
    victim.kill()
    successor.kill()
    moves = plane.frontend.all_moves()
    for kind, request, task in zip(kinds, requests, tasks, strict=True):
        whole, moved = prepared.undisturbed(kind, position), moves[request.request_id]
        what = f"{kind}, {fault.fault} {position}: {moved}"
        assert task.result() == whole, what
        assert {move["reason"] for move in moved} <= {fault.reason}, what
        must_move = position * request.n < whole.completion_tokens and not fault.is_gentle
        assert len(moved) == request.n or (len(moved) < request.n and not must_move), what
        survey.moved_at[kind] |= {move["position"] for move in moved}


async def has_running(worker: Process, number: int) -> bool:
    return await worker.metric("dynamo_engine_request") == number


async def release_first_step(worker: Process, model: str) -> None:
    """Send the last request for which the worker holds its first step, directly, so that it reaches this worker."""
    message = inference_pb2.GenerateRequest(model=model)
    message.tokens.ids.append(32)
    message.stop.max_tokens = 1
    async with grpc.aio.insecure_channel(worker.ready["address"], options=CHANNEL_OPTIONS) as channel:
        with suppress(grpc.aio.AioRpcError):  # The worker may be lost before it answers.
            await inference_pb2_grpc.InferenceStub(channel).Generate(message, timeout=NUDGE_S_MAX).read()
