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
from tests.integration.harness.clients.client import ENDLESS, Client
from tests.integration.harness.clients.requests import Request
from tests.integration.harness.metrics import read_metrics, wait_idle, wait_load
from tests.integration.harness.plane.processes import Process
from tests.integration.harness.plane.two_frontends import LIMITS, REFUSALS, TwoFrontends
from tests.integration.harness.waiting import until

pytestmark = on_both_engines

EVENTS = 24
SEED = 20_231


@pytest.fixture(scope="module")
def two_frontends(start_plane: Start) -> TwoFrontends:
    return TwoFrontends.of(start_plane())


@dataclass
class Paper:
    """What a dispatcher of N slots and Q places must do. One entry for each choice."""

    slots: int
    places: int
    running: list[Client] = field(default_factory=list)
    waiting: list[Client] = field(default_factory=list)
    started: int = 0

    def has_room(self, choices: int) -> bool:
        return len(self.running) + len(self.waiting) + choices <= self.slots + self.places

    def add(self, client: Client) -> None:
        self.waiting += [client] * client.request.n
        self._fill()

    def remove(self, client: Client) -> None:
        self.running = [one for one in self.running if one is not client]
        self.waiting = [one for one in self.waiting if one is not client]
        self._fill()

    def _fill(self) -> None:
        while self.waiting and len(self.running) < self.slots:
            self.running.append(self.waiting.pop(0))
            self.started += 1

    @property
    def load(self) -> tuple[int, int]:
        return len(self.running), len(self.waiting)

    def inside(self) -> list[Client]:
        return list(dict.fromkeys((*self.running, *self.waiting)))


@dataclass
class History:
    """One history of arrivals and leavings at a worker, and the same on paper."""

    two_frontends: TwoFrontends
    worker: Process
    model: str
    paper: Paper
    rng: random.Random
    group: asyncio.TaskGroup
    asked: int = 0
    refused: int = 0

    async def one_comes(self) -> None:
        """One that has room on paper gets in, at once or when a frontend forgets that the worker was full."""
        client = self._visit()
        if self.paper.has_room(client.request.n):
            while not await self._gets_in(client):
                client = Client(client.frontend, client.request)
            return
        self._start(client)
        refused = await client.refusal()
        if client.request.n > self.paper.slots + self.paper.places:
            assert refused.reason == "INVALID_ARGUMENT"  # However long it waited, it would never fit.
            return
        assert refused.reason in REFUSALS
        self.refused += 1

    def _visit(self) -> Client:
        choices, protocol = self.rng.choice((1, 1, 1, 2, 3)), self.rng.choice(("grpc", "stream"))
        request = Request(protocol, model=self.model, max_tokens=ENDLESS, n=choices)
        return Client(self.rng.choice(self.two_frontends.frontends), request)

    def _start(self, client: Client) -> None:
        client.start(self.group)
        self.asked += 1

    async def _gets_in(self, client: Client) -> bool:
        """Whether it does, on paper as well."""
        running_before, waiting_before = self.paper.load
        self._start(client)

        async def is_decided() -> bool:
            metrics = await read_metrics(self.worker)
            entered = running_before + waiting_before + client.request.n
            return client.is_refused or metrics.running + metrics.waiting == entered

        await until(is_decided)
        if client.is_refused:
            self.refused += 1
            return False
        self.paper.add(client)
        return True

    def one_leaves(self) -> None:
        client = self.rng.choice(self.paper.inside())
        client.hang_up()
        self.paper.remove(client)

    async def compare(self) -> None:
        """The worker has as many as the paper, and those have begun that should have, in their order."""
        await wait_load(self.worker, *self.paper.load)
        await until(lambda: all(client.has_begun for client in self.paper.running))
        assert not any(client.has_begun for client in self.paper.waiting if client not in self.paper.running)


@pytest.mark.parametrize(("slots", "places"), LIMITS)
def test_worker_admits_and_starts_requests_like_the_model(two_frontends: TwoFrontends, slots: int, places: int) -> None:
    rng = random.Random(SEED + 10 * slots + places)

    async def scenario() -> History:
        worker, model = await two_frontends.worker(slots, places)
        async with asyncio.TaskGroup() as group:
            history = History(two_frontends, worker, model, Paper(slots, places), rng, group)
            for _ in range(EVENTS):
                if history.paper.inside() and rng.random() < 0.4:
                    history.one_leaves()
                else:
                    await history.one_comes()
                await history.compare()
            while history.paper.inside():
                history.one_leaves()
                await history.compare()
        await wait_idle(worker, *two_frontends.frontends)
        waits = (await read_metrics(worker)).sum("dynamo_work_handler_permit_wait_seconds_count")
        assert waits == history.paper.started
        return history

    history = asyncio.run(scenario())
    asked, refused = asyncio.run(two_frontends.counted(history.model))
    assert (asked, refused) == (history.asked, history.refused)
