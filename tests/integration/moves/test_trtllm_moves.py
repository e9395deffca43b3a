"""A moved answer of TensorRT-LLM is the unmoved one: text, token ids, log probabilities, usage and finish reason.

| workload | nemesis | checker |
| --- | --- | --- |
| all CASES at a time, gRPC, SSE and unary by turns | SIGKILL of their worker at 8 positions | `Answer`, one move |
| the same | SIGSTOP at 2 positions | the same, for STALLED |
| the same, over two workers | SIGTERM of one at 2 positions | `Answer`, some have moved, exit 0 |

A round asks all of one worker, strikes it when the watched one has got so many tokens, and starts the next worker: it
takes all over and is the one to be struck in the next round. All are greedy: nothing else is promised to move.
"""

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field, replace
from signal import SIGKILL, SIGSTOP, SIGTERM, Signals

from tests.integration.conftest import Start, on_trtllm
from tests.integration.harness.answers import Answer
from tests.integration.harness.asks import PROTOCOLS, Ask
from tests.integration.harness.clients import answer, gathered
from tests.integration.harness.plane import Plane, Process, until

pytestmark = on_trtllm

TOKENS = 48
TARGETS = range(1, 37, 5)
FEWER = (3, 25)
ROUNDS = [
    *((SIGKILL, target) for target in TARGETS),
    *((SIGSTOP, target) for target in FEWER),
    *((SIGTERM, target) for target in FEWER),
]
REASONS = {SIGKILL: "DISCONNECTED", SIGSTOP: "STALLED", SIGTERM: "DRAINING"}
ITL = "--mocker-itl-ms=10"
GREEDY = Ask(max_tokens=TOKENS)
CASES = {
    "greedy": GREEDY,
    "chat with logprobs": replace(GREEDY, is_chat=True, logprobs=3),
    "logprobs": replace(GREEDY, prompt="Of the sea", logprobs=0),
    "two choices": replace(GREEDY, n=2),
    "all scripts": replace(GREEDY, is_chat=True, prompt="日本語 🎉 с ёлкой"),
    "biased": replace(GREEDY, logit_bias={97: 14.0, 98: 13.5}),
}
"""The first is the watched one. Two more are made of its answer: see `with_stops`."""


def with_stops(whole: Answer) -> dict[str, Ask]:
    """Cases that end in the middle of the greedy answer."""
    assert whole.token_ids is not None
    first: dict[int, int] = {}
    for position, token in enumerate(whole.token_ids):
        first.setdefault(token, position)
    late = next(token for token, position in first.items() if position >= TOKENS // 2)
    return {
        "stop string": replace(GREEDY, stop=whole.text[20:26]),
        "stop token": replace(GREEDY, stop_token_ids=(late,)),
    }


@dataclass
class Stage:
    """The cases, their undisturbed answers by case and protocol, and where each case has moved.

    left_at: where streams left a worker that was asked to go.
    """

    plane: Plane
    cases: dict[str, Ask] = field(default_factory=dict)
    expected: dict[tuple[str, str], Answer] = field(default_factory=dict)
    moved_at: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    left_at: list[int] = field(default_factory=list)

    async def learn(self) -> None:
        """The answers without any fault, from a worker that goes afterwards."""
        worker = await self.plane.worker("--mocker-itl-ms=1")
        self.cases = {**CASES, **with_stops(await answer(self.plane.frontend, replace(GREEDY, protocol="grpc")))}
        asks = {(name, way): replace(ask, protocol=way) for name, ask in self.cases.items() for way in PROTOCOLS}
        answers = await gathered(answer(self.plane.frontend, ask) for ask in asks.values())
        self.expected = dict(zip(asks, answers, strict=True))
        worker.kill()
        await until(lambda: self.plane.frontend.events("worker lost"))

    def asks(self, number: int) -> dict[str, Ask]:
        """All, over other protocols in each round, but for the watched one."""
        named = {name: ask.named(f"{number}-{name.replace(' ', '-')}") for name, ask in self.cases.items()}
        ways = {name: PROTOCOLS[(number + index) % 3] for index, name in enumerate(named)} | {"greedy": "grpc"}
        return {name: replace(ask, protocol=ways[name]) for name, ask in named.items()}


def test_greedy_answers_go_on_exactly_from_wherever_they_are_cut(start_plane: Start) -> None:
    stage = Stage(start_plane())

    async def scenario() -> None:
        await stage.learn()
        worker = await stage.plane.worker(ITL)
        for number, (nemesis, target) in enumerate(ROUNDS):
            worker = await strike_under_all(stage, worker, number, nemesis, target)

    asyncio.run(scenario())
    for name, ask in stage.cases.items():
        whole = stage.expected[name, "grpc"]
        assert whole.essence == stage.expected[name, "unary"].essence == stage.expected[name, "stream"].essence
        if len(whole.choices[0].token_ids or ()) == TOKENS:
            assert len(stage.moved_at[name]) == (len(TARGETS) + len(FEWER)) * ask.n
        assert len(set(stage.moved_at[name])) >= len(FEWER), f"{name} moved at {stage.moved_at[name]}"
    assert stage.left_at
    assert not stage.plane.frontend.events(level="error")


async def strike_under_all(stage: Stage, worker: Process, number: int, nemesis: Signals, target: int) -> Process:
    """One round; the worker for the next one."""
    plane, asks, reached = stage.plane, stage.asks(number), asyncio.Event()
    workers = [worker, *([await plane.worker(ITL)] if nemesis is SIGTERM else [])]
    watched = asks.pop("greedy")
    async with asyncio.TaskGroup() as group:
        tasks = {name: group.create_task(answer(plane.frontend, ask)) for name, ask in asks.items()}
        noting = answer(plane.frontend, watched, lambda tokens: reached.set() if tokens >= target else None)
        tasks["greedy"] = group.create_task(noting)
        await until(lambda: reached.is_set())
        worker.signal(nemesis)
        replacement = workers[-1] if nemesis is SIGTERM else plane.launch(ITL)
    for name, ask in {**asks, "greedy": watched}.items():
        assert tasks[name].result() == stage.expected[name, ask.protocol], f"{name}, round {number}, {nemesis.name}"
        moves = plane.frontend.moves(ask.request_id)
        assert {move["reason"] for move in moves} <= {REASONS[nemesis]}
        (stage.left_at if nemesis is SIGTERM else stage.moved_at[name]).extend(move["position"] for move in moves)
    if nemesis is SIGTERM:
        await until(lambda: worker.status() == 0)
    worker.kill()
    return await plane.found(replacement)
