"""The real model's answers survive kill -9 exactly: text, token ids, usage and finish reason.

| workload | nemesis | checker |
| --- | --- | --- |
| greedy and seeded (0.8), gRPC, SSE and unary, text and chat, three at a time | SIGKILL of their worker | `Answer` |

A round asks three, kills their worker when the watched one has got so many tokens, and starts the next worker, which
takes the three over and is the one to be killed in the next round. Rounds go on until answers of either kind have moved
at 20 different positions. The prompts make the model write characters of several tokens.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count

import pytest

from tests.integration.answers import Answer
from tests.integration.asks import PROTOCOLS, Ask
from tests.integration.clients import answer, gathered
from tests.integration.conftest import Start
from tests.integration.plane import Plane, Process, until

pytestmark = pytest.mark.model

POSITIONS = 20
TOKENS = 24
ROUNDS_MAX = 60
CHAT_EVERY = 5
"""Every fifth round is a chat: a chat template makes prompts long, and prompts cost most."""
GREEDY, SEEDED = 0.0, 0.8
PROMPTS = {False: "日本の歴史", True: "Translate to Greek: I love you"}
LANES = ("lane0", "lane1")
OPTIONS = ("--engine=llamacpp", "--model=smollm2", "--threads=1")

Key = tuple[float, bool]
"""Temperature, and whether it is a chat."""
KEYS: list[Key] = [(temperature, is_chat) for temperature in (GREEDY, SEEDED) for is_chat in (False, True)]


@dataclass
class Survey:
    """At which positions answers of each temperature have moved."""

    moved_at: dict[float, set[int]] = field(default_factory=lambda: {GREEDY: set(), SEEDED: set()})

    @property
    def is_complete(self) -> bool:
        return all(len(positions) >= POSITIONS for positions in self.moved_at.values())

    def next_target(self, temperature: float, number: int) -> int:
        """A position at which no answer of this temperature has moved yet."""
        missing = sorted(set(range(1, TOKENS)) - self.moved_at[temperature])
        return missing[number % len(missing)] if missing else TOKENS // 2


@dataclass(frozen=True)
class Lane:
    """A model with one worker at a time, and the undisturbed answers."""

    plane: Plane
    name: str
    expected: Mapping[Key, Answer]

    def launch(self) -> Process:
        return self.plane.launch(*OPTIONS, f"--served-model-name={self.name}")

    def check(self, ask: Ask, got: Answer) -> set[int]:
        """The positions at which the request has moved; its answer must be the undisturbed one."""
        whole = self.expected[ask.temperature, ask.is_chat]
        assert got == (whole if ask.protocol == "grpc" else whole.essence)
        return {move["position"] for move in self.plane.frontend.moves(ask.request_id)}


def make_ask(key: Key, model: str, protocol: str = "grpc", request_id: str = "") -> Ask:
    temperature, is_chat = key
    ask = Ask(protocol, is_chat, temperature, PROMPTS[is_chat], max_tokens=TOKENS, ignore_eos=False)
    return ask.named(request_id, model=model)


def test_the_answers_of_a_real_model_go_on_exactly_from_20_positions_each(start_plane: Start) -> None:
    plane, survey, numbers = start_plane(), Survey(), count()

    async def run_lane(lane: Lane, worker: Process) -> None:
        while not survey.is_complete:
            number = next(numbers)
            assert number < ROUNDS_MAX, survey
            worker = await kill_under_three(lane, worker, number, survey)

    async def scenario() -> None:
        workers = {name: await plane.worker(*OPTIONS, f"--served-model-name={name}") for name in LANES}
        answers = await gathered(answer(plane.frontend, make_ask(key, LANES[0])) for key in KEYS)
        expected = dict(zip(KEYS, answers, strict=True))
        async with asyncio.TaskGroup() as group:
            for name, worker in workers.items():
                group.create_task(run_lane(Lane(plane, name, expected), worker))

    asyncio.run(scenario())
    assert not plane.frontend.events(level="error")


async def kill_under_three(lane: Lane, worker: Process, number: int, survey: Survey) -> Process:
    """One round; the worker for the next one."""
    frontend, is_chat = lane.plane.frontend, number % CHAT_EVERY == 0
    others = [
        make_ask((temperature, is_chat), lane.name, PROTOCOLS[(number + index) % 3], f"other-{number}-{index}")
        for index, temperature in enumerate((GREEDY, SEEDED))
    ]
    watched = make_ask(((GREEDY, SEEDED)[number % 2], is_chat), lane.name, "grpc", f"watched-{number}")
    target, reached = survey.next_target(watched.temperature, number), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        tasks = [(ask, group.create_task(answer(frontend, ask))) for ask in others]
        await until(lambda: has_running(worker, len(others)))
        noting = answer(frontend, watched, lambda tokens: reached.set() if tokens >= target else None)
        watching = group.create_task(noting)
        tasks.append((watched, watching))
        await until(lambda: reached.is_set() or watching.done())
        worker.kill()
        replacement = lane.launch()
    for ask, task in tasks:
        survey.moved_at[ask.temperature] |= lane.check(ask, task.result())
    return await lane.plane.found(replacement)


async def has_running(worker: Process, number: int) -> bool:
    return await worker.metric("dynamo_engine_request") == number
