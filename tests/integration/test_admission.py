"""N requests run and Q wait, exactly, whoever asks and in whatever order: counted from outside of a real worker.

| workload | nemesis | checker |
| --- | --- | --- |
| endless requests at once, through two frontends | N and Q far below | N + Q are in, each other is told why not |
| the same one by one, some of many choices | clients leave, seeded | a dispatcher on paper: verdicts, gauges, order |
| short ones at seeded moments | clients leave, seeded | never above N or Q; every request counts once |
| one that waits | the queue's timeout, its deadline, the queue's bound | the engine never hears of it |
"""

import asyncio
import random
from dataclasses import dataclass, field
from itertools import count

import pytest

from tests.integration.answers import Answer, Refused
from tests.integration.asks import PROTOCOLS, Ask
from tests.integration.clients import gathered, is_answered, outcome
from tests.integration.conftest import Start
from tests.integration.plane import Frontend, Plane, Process, until
from tests.integration.readings import read, wait_load, wait_quiet
from tests.integration.visits import ENDLESS, Visit

LIMITS = [(1, 0), (1, 1), (2, 2), (3, 0), (2, 5), (5, 3)]
BURST = 40
EVENTS = 24
HURRIES = 120
SEED = 20_231
REFUSALS = ("WORKER_AT_CAPACITY", "OVERLOADED")
NAMES = count()


@dataclass
class Stage:
    """Two frontends that know the same workers."""

    plane: Plane
    other: Frontend

    @property
    def frontends(self) -> tuple[Frontend, Frontend]:
        return (self.plane.frontend, self.other)

    async def worker(self, slots: int, places: int, *options: str) -> tuple[Process, str]:
        """A worker that both have found, and the name of its model, which no other worker serves."""
        model = f"mocker-{next(NAMES)}"
        limits = (f"--engine-request-limit={slots}", f"--request-queue-limit={places}")
        worker = await self.plane.worker(f"--served-model-name={model}", "--mocker-itl-ms=5", *limits, *options)
        await until(lambda: self.other.has_found(worker))
        return worker, model


@pytest.fixture(scope="module")
def stage(start_plane: Start) -> Stage:
    plane = start_plane()
    return Stage(plane, plane.start_frontend())


@pytest.mark.parametrize(("slots", "places"), LIMITS)
def test_of_a_burst_through_two_frontends_exactly_n_and_q_are_in(stage: Stage, slots: int, places: int) -> None:
    async def scenario() -> None:
        worker, model = await stage.worker(slots, places)
        async with asyncio.TaskGroup() as group:
            visits = [
                Visit(stage.frontends[number % 2], Ask(PROTOCOLS[number % 3], model=model, max_tokens=ENDLESS))
                for number in range(BURST)
            ]
            for visit in visits:
                visit.start(group)
            await until(lambda: sum(visit.is_refused for visit in visits) == BURST - slots - places)
            await wait_load(worker, slots, places)
            assert sum(visit.ended is None for visit in visits) == slots + places
            for visit in visits:
                visit.leave()
        await wait_quiet(worker, *stage.frontends)
        for visit in visits:
            if isinstance(visit.ended, Refused):
                check_refusal(visit.ended, slots, places)

    asyncio.run(scenario())


def check_refusal(refused: Refused, slots: int, places: int) -> None:
    """Both limits, and a load that was at them: they were refused for that alone."""
    assert refused.reason in REFUSALS
    if refused.reason == "WORKER_AT_CAPACITY" and refused.code == "RESOURCE_EXHAUSTED":
        told = {"engine_request_limit": slots, "request_queue_limit": places, "running": slots, "waiting": places}
        assert {name: int(refused.error[name]) for name in told} == told


# One by one, beside a dispatcher on paper


@dataclass
class Paper:
    """What a dispatcher of N slots and Q places must do. One entry for each choice."""

    slots: int
    places: int
    running: list[Visit] = field(default_factory=list)
    waiting: list[Visit] = field(default_factory=list)

    def has_room(self, choices: int) -> bool:
        return len(self.running) + len(self.waiting) + choices <= self.slots + self.places

    def add(self, visit: Visit) -> None:
        self.waiting += [visit] * visit.ask.n
        self._fill()

    def remove(self, visit: Visit) -> None:
        self.running = [one for one in self.running if one is not visit]
        self.waiting = [one for one in self.waiting if one is not visit]
        self._fill()

    def _fill(self) -> None:
        while self.waiting and len(self.running) < self.slots:
            self.running.append(self.waiting.pop(0))

    @property
    def load(self) -> tuple[int, int]:
        return len(self.running), len(self.waiting)

    def inside(self) -> list[Visit]:
        return list(dict.fromkeys((*self.running, *self.waiting)))


@dataclass
class History:
    """One history of arrivals and leavings at a worker, and the same on paper."""

    stage: Stage
    worker: Process
    model: str
    paper: Paper
    rng: random.Random
    group: asyncio.TaskGroup
    asked: int = 0
    refused: int = 0

    async def one_comes(self) -> None:
        """One that has room on paper gets in, at once or when a frontend forgets that the worker was full."""
        visit = self._visit()
        if self.paper.has_room(visit.ask.n):
            while not await self._gets_in(visit):
                visit = Visit(visit.frontend, visit.ask)
            return
        self._start(visit)
        refused = await visit.refusal()
        if visit.ask.n > self.paper.slots + self.paper.places:
            assert refused.reason == "INVALID_ARGUMENT"  # However long it waited, it would never fit.
            return
        assert refused.reason in REFUSALS
        self.refused += 1

    def _visit(self) -> Visit:
        choices, protocol = self.rng.choice((1, 1, 1, 2, 3)), self.rng.choice(("grpc", "stream"))
        ask = Ask(protocol, model=self.model, max_tokens=ENDLESS, n=choices)
        return Visit(self.rng.choice(self.stage.frontends), ask)

    def _start(self, visit: Visit) -> None:
        visit.start(self.group)
        self.asked += 1

    async def _gets_in(self, visit: Visit) -> bool:
        """Whether it does, on paper as well."""
        running_before, waiting_before = self.paper.load
        self._start(visit)

        async def is_decided() -> bool:
            reading = await read(self.worker)
            entered = running_before + waiting_before + visit.ask.n
            return visit.is_refused or reading.running + reading.waiting == entered

        await until(is_decided)
        if visit.is_refused:
            self.refused += 1
            return False
        self.paper.add(visit)
        return True

    def one_leaves(self) -> None:
        visit = self.rng.choice(self.paper.inside())
        visit.leave()
        self.paper.remove(visit)

    async def compare(self) -> None:
        """The worker has as many as the paper, and those have begun that should have, in their order."""
        await wait_load(self.worker, *self.paper.load)
        await until(lambda: all(visit.has_begun for visit in self.paper.running))
        assert not any(visit.has_begun for visit in self.paper.waiting if visit not in self.paper.running)


@pytest.mark.parametrize(("slots", "places"), LIMITS)
def test_whoever_comes_and_goes_the_worker_does_what_the_rules_say(stage: Stage, slots: int, places: int) -> None:
    rng = random.Random(SEED + 10 * slots + places)

    async def scenario() -> History:
        worker, model = await stage.worker(slots, places)
        async with asyncio.TaskGroup() as group:
            history = History(stage, worker, model, Paper(slots, places), rng, group)
            for _ in range(EVENTS):
                if history.paper.inside() and rng.random() < 0.4:
                    history.one_leaves()
                else:
                    await history.one_comes()
                await history.compare()
            for visit in history.paper.inside():
                visit.leave()
        await wait_quiet(worker, *stage.frontends)
        return history

    history = asyncio.run(scenario())
    asked, refused = asyncio.run(counted(stage, history.model))
    assert (asked, refused) == (history.asked, history.refused)


async def counted(stage: Stage, model: str) -> tuple[float, float]:
    """Requests for the model, and those of them that were rejected, as both frontends count them."""
    readings = [await read(frontend) for frontend in stage.frontends]
    asked = sum(one.sum("dynamo_frontend_requests_total", model=model) for one in readings)
    return asked, sum(one.sum("dynamo_frontend_model_rejection_total", model=model) for one in readings)


# All at a time


async def watch(worker: Process, stop: asyncio.Event) -> tuple[float, float]:
    """The most that ran and waited in any scrape until `stop`."""
    running, waiting = 0.0, 0.0
    while not stop.is_set():
        reading = await read(worker)
        running, waiting = max(running, reading.running), max(waiting, reading.waiting)
    return running, waiting


@pytest.mark.parametrize(("slots", "places"), [(1, 0), (1, 1), (2, 2), (4, 3)])
def test_in_no_moment_of_a_random_rush_are_the_limits_passed(stage: Stage, slots: int, places: int) -> None:
    rng = random.Random(SEED - 10 * slots - places)
    outcomes: list[Answer | Refused] = []

    async def hurry(model: str) -> None:
        """Come at some moment, and leave at another unless the answer is there."""
        fits = min(2, slots + places)
        ask = Ask(rng.choice(PROTOCOLS), model=model, max_tokens=rng.randint(1, 12), n=rng.randint(1, fits))
        frontend, pause_s, patience_s = rng.choice(stage.frontends), rng.random(), rng.choice((0.03, 30.0))
        await asyncio.sleep(pause_s)  # The moment is what is tested.
        try:
            async with asyncio.timeout(patience_s):
                outcomes.append(await outcome(frontend, ask))
        except TimeoutError:
            pass  # It has left.

    async def scenario() -> None:
        worker, model = await stage.worker(slots, places)
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(watch(worker, stop))
            await gathered(hurry(model) for _ in range(HURRIES))
            stop.set()
        running, waiting = watching.result()
        assert running <= slots
        assert waiting <= places
        await wait_quiet(worker, *stage.frontends)
        refusals = [one for one in outcomes if isinstance(one, Refused)]
        assert {one.reason for one in refusals} <= set(REFUSALS)
        asked, rejected = await counted(stage, model)
        assert len(outcomes) <= asked <= HURRIES  # One that left may have left before it had asked.
        assert len(refusals) <= rejected <= len(refusals) + HURRIES - len(outcomes)
        await until(lambda: is_answered(stage.plane.frontend, Ask("grpc", model=model)))

    asyncio.run(scenario())


# What ends a wait


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("cause", ["timeout", "deadline"])
def test_one_that_has_waited_too_long_never_reaches_the_engine(stage: Stage, protocol: str, cause: str) -> None:
    options = ("--queue-timeout=0.3",) if cause == "timeout" else ()
    timeout_s = 0.3 if cause == "deadline" else None

    async def scenario() -> None:
        worker, model = await stage.worker(1, 1, *options)
        async with asyncio.TaskGroup() as group:
            holder = Visit(stage.plane.frontend, Ask(model=model, max_tokens=ENDLESS)).start(group)
            await until(lambda: holder.has_begun)
            before = await read(worker)
            waiting = Visit(stage.other, Ask(protocol, model=model, max_tokens=ENDLESS, timeout_s=timeout_s))
            waiting.start(group)
            refused = await waiting.refusal()
            await wait_load(worker, 1, 0)
            after = await read(worker)
            holder.leave()
        if cause == "deadline":
            assert refused.is_deadline
        else:
            assert refused.reason in REFUSALS
        prompts = [one.sum("unbroken_engine_prefill_tokens_total") for one in (before, after)]
        assert prompts[0] == prompts[1]
        expired = after.sum("unbroken_queue_expired_total", cause=cause)
        if cause == "deadline":  # The frontend's clock may be a little ahead: then it says so to the worker.
            expired += after.sum("dynamo_component_cancellation_total", cause="signal", phase="queued")
        assert expired == 1

    asyncio.run(scenario())


def test_no_more_prompt_tokens_wait_than_the_limit(stage: Stage) -> None:
    async def scenario() -> None:
        worker, model = await stage.worker(1, 5, "--queue-token-limit=20")

        def visit(prompt: str) -> Visit:
            return Visit(stage.plane.frontend, Ask("grpc", model=model, prompt=prompt, max_tokens=ENDLESS))

        async with asyncio.TaskGroup() as group:
            holder = visit("a long prompt that runs at once, whatever may wait").start(group)
            await until(lambda: holder.has_begun)
            first = visit("fifteen letters").start(group)
            await wait_load(worker, 1, 1)
            assert (await visit("sixwww").start(group).refusal()).reason in REFUSALS

            inside: list[Visit] = []

            async def five_more_get_in() -> bool:
                """Once the frontend forgets that the worker was full."""
                five = visit("five!").start(group)

                async def is_decided() -> bool:
                    return five.is_refused or (await read(worker)).waiting == 2

                await until(is_decided)
                if not five.is_refused:
                    inside.append(five)
                return bool(inside)

            await until(five_more_get_in)
            for one in (holder, first, *inside):
                one.leave()

    asyncio.run(scenario())
