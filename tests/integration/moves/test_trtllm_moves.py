"""A moved answer of TensorRT-LLM equals the unmoved one: text, token ids, log probabilities, usage and finish reason.

| workload | nemesis | checker |
| --- | --- | --- |
| all CASES at a time, gRPC, SSE and unary by turns | SIGKILL of their worker at 8 positions | `Answer`, one move |
| the same | SIGSTOP at 2 positions | the same, for STALLED |
| the same, over two workers | SIGTERM of one at 2 positions | `Answer`, some have moved, exit 0 |
| a sampled answer | SIGKILL, or SIGTERM, of its worker | complete, no gap, one move, `continuation` is `prefix` |
| the same, kept | SIGKILL of its worker, then its client comes back elsewhere | `continuation` is `prefix` |

A round sends all requests to one worker, strikes it when the watched stream has enough tokens, and starts the next
worker, which takes all streams over and is struck in the next round. All its requests are greedy, because no others
continue exactly.
"""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from signal import SIGKILL, SIGSTOP, SIGTERM, Signals

import pytest

from tests.integration.conftest import Start, on_trtllm
from tests.integration.harness.clients.answers import Answer
from tests.integration.harness.clients.requests import PROTOCOLS, Request
from tests.integration.harness.clients.returning import ReturningClient
from tests.integration.harness.clients.send import answer, run_together
from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.plane.processes import Process
from tests.integration.harness.waiting import until

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
ITL = "--mocker-itl-ms=50"
GREEDY = Request(max_tokens=TOKENS)
CASES = {
    "greedy": GREEDY,
    "chat with logprobs": replace(GREEDY, is_chat=True, logprobs=3),
    "logprobs": replace(GREEDY, prompt="Of the sea", logprobs=0),
    "two choices": replace(GREEDY, n=2),
    "all scripts": replace(GREEDY, is_chat=True, prompt="日本語 🎉 с ёлкой"),
    "biased": replace(GREEDY, logit_bias={97: 14.0, 98: 13.5}),
}
"""The first case is the watched one. `with_stops` adds two more that depend on its answer."""


def with_stops(whole: Answer) -> dict[str, Request]:
    """Return cases that end in the middle of the greedy answer."""
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
class Setup:
    """The cases, their undisturbed answers by case and protocol, and where each case has moved.

    `left_at`: the positions at which streams left a draining worker.
    """

    plane: Plane
    cases: dict[str, Request] = field(default_factory=dict)
    expected: dict[tuple[str, str], Answer] = field(default_factory=dict)
    moved_at: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    left_at: list[int] = field(default_factory=list)

    async def collect_answers(self) -> None:
        """Collect the answers without a fault, from a worker that is removed afterwards."""
        worker = await self.plane.worker("--mocker-itl-ms=1")
        self.cases = {**CASES, **with_stops(await answer(self.plane.frontend, replace(GREEDY, protocol="grpc")))}
        requests = {
            (name, ending): replace(request, protocol=ending)
            for name, request in self.cases.items()
            for ending in PROTOCOLS
        }
        answers = await run_together(answer(self.plane.frontend, request) for request in requests.values())
        self.expected = dict(zip(requests, answers, strict=True))
        worker.kill()
        await until(lambda: self.plane.frontend.events("worker lost"))

    def requests(self, number: int) -> dict[str, Request]:
        """Return all requests. Protocols change from round to round, except for the watched case."""
        named = {name: request.named(f"{number}-{name.replace(' ', '-')}") for name, request in self.cases.items()}
        ways = {name: PROTOCOLS[(number + index) % 3] for index, name in enumerate(named)} | {"greedy": "grpc"}
        return {name: replace(request, protocol=ways[name]) for name, request in named.items()}


def test_greedy_answers_continue_exactly_from_any_position(start_plane: Start) -> None:
    prepared = Setup(start_plane(frontend=("--stall-ms=3000",)))

    async def scenario() -> None:
        await prepared.collect_answers()
        worker = await prepared.plane.worker(ITL)
        for number, (fault, target) in enumerate(ROUNDS):
            worker = await run_round(prepared, worker, number, fault, target)

    asyncio.run(scenario())
    for name, request in prepared.cases.items():
        whole = prepared.expected[name, "grpc"]
        assert whole.essence == prepared.expected[name, "unary"].essence == prepared.expected[name, "stream"].essence
        if len(whole.choices[0].token_ids or ()) == TOKENS:
            assert len(prepared.moved_at[name]) == (len(TARGETS) + len(FEWER)) * request.n
        assert len(set(prepared.moved_at[name])) >= len(FEWER), f"{name} moved at {prepared.moved_at[name]}"
    assert prepared.left_at
    assert not prepared.plane.frontend.events_until_now(level="error")


async def run_round(prepared: Setup, worker: Process, number: int, fault: Signals, target: int) -> Process:
    """Run one round; return the worker for the next one."""
    plane, requests, reached = prepared.plane, prepared.requests(number), asyncio.Event()
    workers = [worker, *([await plane.worker(ITL)] if fault is SIGTERM else [])]
    watched = requests.pop("greedy")
    async with asyncio.TaskGroup() as group:
        tasks = {name: group.create_task(answer(plane.frontend, request)) for name, request in requests.items()}
        await until(lambda: have_running(workers, sum(request.n for request in requests.values())))
        noting = answer(plane.frontend, watched, lambda tokens: reached.set() if tokens >= target else None)
        tasks["greedy"] = group.create_task(noting)
        await until(lambda: reached.is_set())
        worker.signal(fault)
        replacement = workers[-1] if fault is SIGTERM else plane.launch(ITL)
    for name, request in {**requests, "greedy": watched}.items():
        assert tasks[name].result() == prepared.expected[name, request.protocol], (
            f"{name}, round {number}, {fault.name}"
        )
        moves = plane.frontend.moves(request.request_id)
        assert {move["reason"] for move in moves} <= {REASONS[fault]}
        (prepared.left_at if fault is SIGTERM else prepared.moved_at[name]).extend(move["position"] for move in moves)
    if fault is SIGTERM:
        await until(lambda: worker.status() == 0)
    worker.kill()
    return await plane.found(replacement)


async def have_running(workers: Sequence[Process], number: int) -> bool:
    return sum([await worker.metric("dynamo_engine_request") for worker in workers]) == number


@pytest.mark.parametrize("fault", [SIGKILL, SIGTERM], ids=["SIGKILL", "SIGTERM"])
@pytest.mark.parametrize("protocol", ["grpc", "stream"])
def test_sampled_answer_continues_after_the_delivered_tokens_and_says_so(
    start_plane: Start, protocol: str, fault: Signals
) -> None:
    plane, reached = start_plane(frontend=("--stall-ms=3000",)), asyncio.Event()
    sampled = Request(protocol, temperature=0.8, seed=None, max_tokens=TOKENS)
    received: list[int] = []

    def note(tokens: int) -> None:
        received.append(tokens)
        if tokens >= FEWER[0]:
            reached.set()

    async def scenario() -> tuple[Answer, Answer]:
        victim = await plane.worker(ITL, "--drain-timeout=0.2")
        unmoved = await answer(plane.frontend, replace(sampled, max_tokens=2))
        async with asyncio.TaskGroup() as group:
            moved = group.create_task(answer(plane.frontend, sampled.named("sampled"), note))
            await until(reached.is_set)
            await plane.worker(ITL)
            victim.signal(fault)
        return unmoved, moved.result()

    unmoved, moved = asyncio.run(scenario())

    assert (unmoved.only.continuation, moved.only.continuation) == (None, "prefix")
    assert (moved.completion_tokens, moved.finish) == (TOKENS, "length")
    assert received == sorted(received)
    (move,) = plane.frontend.moves("sampled")
    assert move["reason"] == REASONS[fault]
    assert 0 < move["position"] < TOKENS


def test_resumed_answer_says_that_it_had_continued_with_other_draws(start_plane: Start) -> None:
    """Its worker stands still until another is found, so that the client does not get enough to leave before that."""
    plane, count = start_plane(frontend=("--stall-ms=60000",)), 120
    body = {"model": "mocker", "prompt": "Once", "max_tokens": count, "temperature": 0.8, "return_token_ids": True}
    client = ReturningClient({**body, "n": 1, "ignore_eos": True})

    async def scenario() -> None:
        other = await asyncio.to_thread(plane.start_frontend)
        victim = await plane.worker(ITL)
        async with asyncio.TaskGroup() as group:
            group.create_task(client.ask(plane.frontend, events_max=count - TOKENS))
            await until(lambda: len(client.ids) >= FEWER[0])
            victim.signal(SIGSTOP)
            await plane.worker(ITL)
            victim.signal(SIGKILL)
        assert not client.has_ended
        await client.come_back_once_known(other)

    asyncio.run(scenario())

    (choice,) = client.choices.values()
    assert (choice.continuation, choice.finish, len(choice.token_ids)) == ("prefix", "length", count)
