"""Whoever comes and goes, a worker does what a dispatcher on paper does: the same verdicts, gauges and order.

| workload | nemesis | checker |
| --- | --- | --- |
| endless requests one by one, some of several choices, through two frontends | clients leave, seeded | `Paper` |
"""

import asyncio
import random
from dataclasses import dataclass, field

import pytest

from tests.integration.conftest import Start, on_both_engines
from tests.integration.harness.asks import Ask
from tests.integration.harness.pair import LIMITS, REFUSALS, Pair
from tests.integration.harness.plane import Process, until
from tests.integration.harness.readings import read, wait_load, wait_quiet
from tests.integration.harness.visits import ENDLESS, Visit

pytestmark = on_both_engines

EVENTS = 24
SEED = 20_231


@pytest.fixture(scope="module")
def pair(start_plane: Start) -> Pair:
    return Pair.of(start_plane())


@dataclass
class Paper:
    """What a dispatcher of N slots and Q places must do. One entry for each choice."""

    slots: int
    places: int
    running: list[Visit] = field(default_factory=list)
    waiting: list[Visit] = field(default_factory=list)
    started: int = 0

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
            self.started += 1

    @property
    def load(self) -> tuple[int, int]:
        return len(self.running), len(self.waiting)

    def inside(self) -> list[Visit]:
        return list(dict.fromkeys((*self.running, *self.waiting)))


@dataclass
class History:
    """One history of arrivals and leavings at a worker, and the same on paper."""

    pair: Pair
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
        return Visit(self.rng.choice(self.pair.frontends), ask)

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
def test_whoever_comes_and_goes_the_worker_does_what_the_rules_say(pair: Pair, slots: int, places: int) -> None:
    rng = random.Random(SEED + 10 * slots + places)

    async def scenario() -> History:
        worker, model = await pair.worker(slots, places)
        async with asyncio.TaskGroup() as group:
            history = History(pair, worker, model, Paper(slots, places), rng, group)
            for _ in range(EVENTS):
                if history.paper.inside() and rng.random() < 0.4:
                    history.one_leaves()
                else:
                    await history.one_comes()
                await history.compare()
            while history.paper.inside():
                history.one_leaves()
                await history.compare()
        await wait_quiet(worker, *pair.frontends)
        waits = (await read(worker)).sum("dynamo_work_handler_permit_wait_seconds_count")
        assert waits == history.paper.started
        return history

    history = asyncio.run(scenario())
    asked, refused = asyncio.run(pair.counted(history.model))
    assert (asked, refused) == (history.asked, history.refused)
