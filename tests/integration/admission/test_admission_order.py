"""A worker admits, starts and counts requests exactly like a model of its dispatcher, whoever arrives or leaves.

| workload | nemesis | checker |
| --- | --- | --- |
| endless requests one by one, some with several choices, two frontends | clients leave, seeded | `ExpectedDispatcher` |
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
class ExpectedDispatcher:
    """What a dispatcher with N slots and Q queue places must do. Each choice of a request has an entry of its own."""

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

    def clients(self) -> list[Client]:
        return list(dict.fromkeys((*self.running, *self.waiting)))


@dataclass
class History:
    """A series of arrivals and departures at a worker, compared with the model."""

    two_frontends: TwoFrontends
    worker: Process
    model: str
    expected: ExpectedDispatcher
    rng: random.Random
    group: asyncio.TaskGroup
    asked: int = 0
    refused: int = 0

    async def request_arrives(self) -> None:
        """Send a request. If the model has room, a worker must admit it, possibly after the frontend retries."""
        client = self._new_client()
        if self.expected.has_room(client.request.n):
            while not await self._is_admitted(client):
                client = Client(client.frontend, client.request)
            return
        self._start(client)
        refused = await client.refusal()
        if client.request.n > self.expected.slots + self.expected.places:
            assert refused.reason == "INVALID_ARGUMENT"  # It would never fit, however long it waited.
            return
        assert refused.reason in REFUSALS
        self.refused += 1

    def _new_client(self) -> Client:
        choices, protocol = self.rng.choice((1, 1, 1, 2, 3)), self.rng.choice(("grpc", "stream"))
        request = Request(protocol, model=self.model, max_tokens=ENDLESS, n=choices)
        return Client(self.rng.choice(self.two_frontends.frontends), request)

    def _start(self, client: Client) -> None:
        client.start(self.group)
        self.asked += 1

    async def _is_admitted(self, client: Client) -> bool:
        """Whether the request is admitted; if so, adds it to the model."""
        running_before, waiting_before = self.expected.load
        self._start(client)

        async def is_decided() -> bool:
            metrics = await read_metrics(self.worker)
            entered = running_before + waiting_before + client.request.n
            return client.is_refused or metrics.running + metrics.waiting == entered

        await until(is_decided)
        if client.is_refused:
            self.refused += 1
            return False
        self.expected.add(client)
        return True

    def client_leaves(self) -> None:
        client = self.rng.choice(self.expected.clients())
        client.hang_up()
        self.expected.remove(client)

    async def check(self) -> None:
        """Check that the worker has the model's load, and that exactly the model's running requests have begun."""
        await wait_load(self.worker, *self.expected.load)
        await until(lambda: all(client.has_begun for client in self.expected.running))
        assert not any(client.has_begun for client in self.expected.waiting if client not in self.expected.running)


@pytest.mark.parametrize(("slots", "places"), LIMITS)
def test_worker_admits_and_starts_requests_like_the_model(two_frontends: TwoFrontends, slots: int, places: int) -> None:
    rng = random.Random(SEED + 10 * slots + places)

    async def scenario() -> History:
        worker, model = await two_frontends.worker(slots, places)
        async with asyncio.TaskGroup() as group:
            history = History(two_frontends, worker, model, ExpectedDispatcher(slots, places), rng, group)
            for _ in range(EVENTS):
                if history.expected.clients() and rng.random() < 0.4:
                    history.client_leaves()
                else:
                    await history.request_arrives()
                await history.check()
            while history.expected.clients():
                history.client_leaves()
                await history.check()
        await wait_idle(worker, *two_frontends.frontends)
        waits = (await read_metrics(worker)).sum("dynamo_work_handler_permit_wait_seconds_count")
        assert waits == history.expected.started
        return history

    history = asyncio.run(scenario())
    asked, refused = asyncio.run(two_frontends.request_and_rejection_counts(history.model))
    assert (asked, refused) == (history.asked, history.refused)
