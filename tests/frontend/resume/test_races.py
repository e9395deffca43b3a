"""Two frontends that resume one answer at once: one has all of it, in whatever order the workers hear of them."""

import asyncio
import random
from dataclasses import dataclass
from functools import partial

import pytest

from services.core.errors import Failure, Reason
from services.core.generation.kept import Copy, Generation, Kept
from services.core.request import FinishReason
from services.frontend.layers.migrate import Migrate, MigrateConfig
from services.frontend.layers.route import Route
from services.frontend.layers.transport import Transport
from services.frontend.routing.balancer import Balancer
from services.frontend.routing.thresholds import AdmissionConfig, BusyThresholds
from tests.frontend.migration.support import RecordedMetrics
from tests.frontend.support import BareWorker, BareWorkers
from tests.support.clock import run_clocked, settle
from tests.support.doubles import call_layer, make_request
from tests.worker.generations.sessions import Frontend, Worker, kept_submit
from tests.worker.generations.support import ID

SEEDS = 25
RECORDS = {"a": [7, 8], "b": [7, 8, 9]}
"""What each worker has, when one moves to the other."""
WHOLE = [7, 8, 9, 10]


class Link:
    """The session of one frontend with one worker: a message is heard when the test says so."""

    def __init__(self, name: str, served: Frontend) -> None:
        self.bare = BareWorker(name)
        self._served = served
        self._heard_count = 0

    @property
    def can_deliver(self) -> tuple[bool, bool]:
        """Whether there is a message to the worker, and one to the frontend."""
        return self.bare.has_sent, len(self._served.messages) > self._heard_count

    async def deliver(self, *, to_worker: bool) -> None:
        """What was sent in one turn to the worker, or one message of the worker's. Those that follow wait."""
        if to_worker:
            self._served.session._on_messages(list(self.bare.session._writer.pop_messages()))
        else:
            message = self._served.messages[self._heard_count]
            self._heard_count += 1
            message.ClearField("welcome")  # It has been played.
            self.bare.session._reader.on_messages([message])
        await settle()


@dataclass
class Taker:
    """A frontend that resumes the answer. `order`: the workers, the one with the better copy, as it knows, first."""

    links: dict[str, Link]
    order: str
    epoch: int

    async def resume(self) -> list[int]:
        generation = Generation(ID, 30.0, is_told=True)
        generation.epoch, generation.copies[0] = self.epoch, []
        for name in self.order:
            session = self.links[name].bare.session
            discard = partial(session.generations.discard, ID, 0, self.epoch)
            copy = Copy(session=session.key, token_count=len(RECORDS[name]), is_over=False, discard=discard)
            generation.copies[0].append(copy)
        pool = BareWorkers(*(link.bare for link in self.links.values()))
        route = Route(Transport(), pool, Balancer(BusyThresholds(AdmissionConfig()), random.Random(0)))
        migrate, kept = Migrate(route, MigrateConfig(), RecordedMetrics()), Kept(generation=generation)
        return (await call_layer(migrate, make_request(max_tokens=len(WHOLE)), kept=kept)).token_ids


async def deliver_all(links: list[Link], rng: random.Random) -> None:
    """Deliver what is under way on all links, one message after the other, in any order between the links."""
    while ready := [link for link in links if any(link.can_deliver)]:
        link = rng.choice(ready)
        to_worker, to_frontend = link.can_deliver
        await link.deliver(to_worker=rng.choice((True, False)) if to_worker and to_frontend else to_worker)


async def race(orders: tuple[str, str], epochs: tuple[int, int], seed: int) -> list[list[int] | Reason]:
    """What each of two frontends gets: all tokens, or the reason of its failure."""
    async with Worker().running() as a, Worker().running() as b:
        workers = {"a": a, "b": b}
        for name, worker in workers.items():
            first = await worker.attach()
            await first.send(submits=[kept_submit(1)])
            worker.engine.give(worker.key, RECORDS[name])
            await first.leave()
        takers = [
            Taker({name: Link(name, await worker.attach()) for name, worker in workers.items()}, order, epoch)
            for order, epoch in zip(orders, epochs, strict=True)
        ]
        tasks = [asyncio.ensure_future(taker.resume()) for taker in takers]
        await settle()
        links, rng = [link for taker in takers for link in taker.links.values()], random.Random(seed)
        await deliver_all(links, rng)
        for name, worker in workers.items():
            for key in list(worker.engine.requests):
                worker.engine.give(key, WHOLE[len(RECORDS[name]) :], FinishReason.LENGTH)
        await settle()
        await deliver_all(links, rng)
        got = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), None)
        assert a.store.detached_count == b.store.detached_count == 0
        assert all(isinstance(one, list | Failure) for one in got), got
        return [one.reason if isinstance(one, Failure) else one for one in got]  # type: ignore[misc]


@pytest.mark.parametrize("epochs", [(5, 9), (9, 5)])
@pytest.mark.parametrize("orders", [("ab", "ba"), ("ab", "ab"), ("ba", "ba")])
def test_later_resume_gets_the_whole_answer_and_the_other_is_told(
    orders: tuple[str, str], epochs: tuple[int, int]
) -> None:
    """A bug: two frontends that saw different copies in front, while one moved, each discarded that of the other."""
    for seed in range(SEEDS):
        expected = [WHOLE if epoch == max(epochs) else Reason.TAKEN_OVER for epoch in epochs]

        assert run_clocked(race(orders, epochs, seed)) == expected, f"seed {seed}"
