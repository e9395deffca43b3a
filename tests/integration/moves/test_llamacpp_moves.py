"""A moved answer of a real model equals the unmoved one: text, token ids, log probabilities, usage and finish reason.

| workload | nemesis | checker |
| --- | --- | --- |
| half of CASES at a time, gRPC, SSE and unary by turns | SIGKILL of their worker at 10 positions | `Answer`, one move |
| the same | SIGSTOP at 4 positions | `Answer`, one move |
| the same, over two workers | SIGTERM of one at 4 positions | `Answer`, some have moved, exit 0 |
| JSON by a schema among them | all of these | it fits the schema |

A round sends all requests to one worker, strikes it when the watched stream has enough tokens, and starts the next
worker, which takes all streams over and is struck in the next round. The prompts make the model write characters of
several tokens.
"""

import asyncio
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from signal import SIGKILL, SIGSTOP, SIGTERM, Signals

import pytest

from tests.integration.conftest import Start
from tests.integration.harness.clients.answers import Answer
from tests.integration.harness.clients.requests import PROTOCOLS, Request
from tests.integration.harness.clients.send import answer, run_together
from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.plane.processes import Process
from tests.integration.harness.waiting import until

pytestmark = pytest.mark.model

TARGETS = range(1, 21, 2)
"""The number of tokens of the watched answer when its worker is killed."""
FEWER = (1, 7, 13, 19)
ROUNDS = [
    *((SIGKILL, target) for target in TARGETS),
    *((SIGSTOP, target) for target in FEWER),
    *((SIGTERM, target) for target in FEWER),
]
PATIENT = ("--stall-ms=6000",)
"""Loading a model keeps a busy machine occupied for more than a second."""
DISTINCT_MIN = 7
"""The other streams are about as far as the watched one, so each round adds at most one position."""
TOKENS = 24
OPTIONS = ("--engine=llamacpp", "--model=smollm2", "--threads=1", "--engine-request-limit=5", "--drain-timeout=0.2")
"""The answers are short. Without a short drain most would finish before another worker has computed their prompts."""
NUMBERS = 6
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "numbers": {"type": "array", "items": {"type": "integer", "maximum": 99}, "minItems": 6, "maxItems": NUMBERS},
    },
    "required": ["name", "numbers"],
    "additionalProperties": False,
}
GREEDY = Request(prompt="日本の歴史", max_tokens=TOKENS)
SEEDED = replace(GREEDY, temperature=0.8)
JSON = Request(prompt="As JSON:", max_tokens=100, ignore_eos=False, json_schema=json.dumps(SCHEMA))
LANES: dict[str, dict[str, Request]] = {
    "lane0": {
        "greedy": GREEDY,
        "chat": replace(SEEDED, is_chat=True, prompt="Translate to Greek: I love you"),
        "logprobs": replace(SEEDED, logprobs=3),
        "JSON": JSON,
    },
    "lane1": {
        "seeded": SEEDED,
        "two choices": replace(SEEDED, n=2),
        "penalties": replace(
            SEEDED, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.2, logit_bias={30: 3.0}
        ),
        "seeded JSON": replace(JSON, temperature=0.8),
    },
}
"""Each lane is a model with one worker at a time, and its cases. The first case is the watched one."""


@dataclass
class Lane:
    """One lane at work: its cases, their undisturbed answers by case and protocol, and where each case has moved.

    `left_at`: the positions at which streams left a draining worker.
    """

    plane: Plane
    name: str
    cases: Mapping[str, Request]
    expected: dict[tuple[str, str], Answer] = field(default_factory=dict)
    moved_at: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    left_at: list[int] = field(default_factory=list)

    def launch(self) -> Process:
        return self.plane.launch(*OPTIONS, f"--served-model-name={self.name}")

    @property
    def watched(self) -> str:
        return next(iter(self.cases))

    def requests(self, number: int) -> dict[str, Request]:
        """Return all requests. Protocols change from round to round, except for the watched case."""
        return {
            name: request.named(
                f"{self.name}-{number}-{name.replace(' ', '-')}",
                model=self.name,
                protocol="grpc" if name == self.watched else PROTOCOLS[(number + index) % 3],
            )
            for index, (name, request) in enumerate(self.cases.items())
        }

    async def collect_answers(self) -> None:
        """Collect the answers without a fault. Over HTTP only log probabilities need answers of their own."""
        requests = {(name, "grpc"): replace(request, protocol="grpc") for name, request in self.cases.items()}
        requests |= {
            (name, ending): replace(request, protocol=ending)
            for name, request in self.cases.items()
            for ending in PROTOCOLS[1:]
            if request.logprobs is not None
        }
        answers = await run_together(
            answer(self.plane.frontend, replace(request, model=self.name)) for request in requests.values()
        )
        self.expected = dict(zip(requests, answers, strict=True))
        for name, ending in product(self.cases, PROTOCOLS[1:]):
            whole = self.expected[name, "grpc"].essence
            assert self.expected.setdefault((name, ending), whole).essence == whole

    async def run(self) -> None:
        worker = await self.plane.found(self.launch())
        await self.collect_answers()
        for number, (fault, target) in enumerate(ROUNDS):
            worker = await run_round(self, worker, number, fault, target)


def test_answers_of_a_real_model_continue_exactly_from_10_positions(start_plane: Start) -> None:
    plane = start_plane(frontend=PATIENT)
    lanes = [Lane(plane, name, cases) for name, cases in LANES.items()]

    async def scenario() -> None:
        await run_together(lane.run() for lane in lanes)

    asyncio.run(scenario())
    for lane in lanes:
        for name, request in lane.cases.items():
            assert len(lane.moved_at[name]) == (len(TARGETS) + len(FEWER)) * request.n
            assert len(set(lane.moved_at[name])) >= DISTINCT_MIN, f"{name} moved at {lane.moved_at[name]}"
        assert lane.left_at
    check_json(lanes[0].expected["JSON", "grpc"].text)
    check_json(lanes[1].expected["seeded JSON", "grpc"].text)
    assert not plane.frontend.events_until_now(level="error")


def check_json(text: str) -> None:
    """Check that the text fits SCHEMA."""
    value = json.loads(text)
    assert value.keys() == {"name", "numbers"}
    assert isinstance(value["name"], str)
    assert len(value["numbers"]) == NUMBERS
    assert all(isinstance(number, int) for number in value["numbers"])


async def run_round(lane: Lane, worker: Process, number: int, fault: Signals, target: int) -> Process:
    """Run one round; return the worker for the next one."""
    frontend, requests, reached = lane.plane.frontend, lane.requests(number), asyncio.Event()
    workers = [worker, *([await lane.plane.found(lane.launch())] if fault is SIGTERM else [])]
    watched = requests.pop(lane.watched)
    async with asyncio.TaskGroup() as group:
        tasks = {name: group.create_task(answer(frontend, request)) for name, request in requests.items()}
        await until(lambda: have_running(workers, sum(request.n for request in requests.values())))
        noting = answer(frontend, watched, lambda tokens: reached.set() if tokens >= target else None)
        tasks[lane.watched] = group.create_task(noting)
        await until(lambda: reached.is_set() or tasks[lane.watched].done())
        worker.signal(fault)
        replacement = workers[-1] if fault is SIGTERM else lane.launch()
    for name, request in {**requests, lane.watched: watched}.items():
        got, expected = tasks[name].result(), lane.expected[name, request.protocol]
        assert got == expected, f"{name}, {request.protocol}, round {number}, {fault.name}"
        moves = [move["position"] for move in frontend.moves(request.request_id)]
        if fault is SIGTERM:
            lane.left_at += moves
        else:
            lane.moved_at[name] += moves
    if fault is SIGTERM:
        await until(lambda: worker.status() == 0)
    worker.kill()
    return await lane.plane.found(replacement)


async def have_running(workers: Sequence[Process], number: int) -> bool:
    return sum([await worker.metric("dynamo_engine_request") for worker in workers]) == number
