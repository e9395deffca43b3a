"""Choice groups, from the layer Choices down to the session: one worker takes all choices of a request, or none.

| event before the choices have begun | effect |
| --- | --- |
| none | one message goes to one worker |
| the worker refuses them for capacity | all of them try another worker together |
| every worker refuses them | the request is refused, and no place is kept anywhere |
| the worker is lost, leaves, or fails one of them | each of those choices goes on alone |
"""

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.common_layers import stack
from services.core.errors import Failure, Reason
from services.core.interface import Layer
from services.frontend.layers.choices import Choices
from services.frontend.layers.detokenize import Detokenize
from services.frontend.layers.migrate import Migrate, MigrateConfig
from services.frontend.layers.route import Route
from services.frontend.layers.transport import Transport
from services.frontend.metrics.definitions import build_metrics
from services.frontend.routing.balancer import Balancer
from services.frontend.routing.thresholds import AdmissionConfig, BusyThresholds
from services.rpc.codec import seconds_to_wire
from services.stubs import worker_pb2
from tests.frontend.support import BareWorker, BareWorkers
from tests.support.clock import WAIT_S
from tests.support.doubles import Collected, call_layer, make_request, models_of, run_async

COUNT = 3
Play = Callable[[BareWorker, BareWorker], Coroutine[Any, Any, None]]


def layers_over(workers: BareWorkers, replacement_wait_s: float = 0.01) -> Layer:
    balancer = Balancer(BusyThresholds(AdmissionConfig()), random.Random(0))
    pool: Any = workers
    return stack(
        Choices,
        lambda inner: Detokenize(inner, models_of()),
        lambda inner: Migrate(inner, MigrateConfig(replacement_wait_s=replacement_wait_s), build_metrics()),
        lambda inner: Route(inner, pool, balancer),
        innermost=Transport(),
    )


def ask(play: Play, replacement_wait_s: float = 0.01, **call: Any) -> Collected | Failure:
    """Run a request over two workers, and check that no place is left. `play`: gets the first worker asked first."""

    async def scenario() -> Collected | Failure:
        workers = [BareWorker("a"), BareWorker("b")]
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(outcome(layers_over(BareWorkers(*workers), replacement_wait_s), COUNT, **call))
            await play(*await in_order_of_asking(workers))
        assert [one.candidate.in_flight_count for one in workers] == [0, 0]
        assert [len(one.session._streams._reserved) for one in workers] == [0, 0]
        return asking.result()

    return run_async(scenario())


async def in_order_of_asking(workers: list[BareWorker]) -> tuple[BareWorker, BareWorker]:
    while not any(one.candidate.in_flight_count for one in workers):
        await asyncio.sleep(0)
    workers.sort(key=lambda one: -one.candidate.in_flight_count)
    return workers[0], workers[-1]


async def outcome(layer: Layer, n: int, **call: Any) -> Collected | Failure:
    try:
        return await call_layer(layer, make_request(n=n), **call)
    except Failure as failure:
        return failure


async def submitted(worker: BareWorker) -> list[tuple[int, int, int]]:
    """For each request in the next message: its first stream id, its count of choices and its first choice."""
    submits = (await worker.sent()).submits
    return [(one.stream_id, max(one.choices, 1), one.request.choice) for one in submits]


async def turns(count: int = 10) -> None:
    """Let all tasks run until they wait."""
    for _ in range(count):
        await asyncio.sleep(0)


def answered(result: Collected | Failure) -> list[list[int]]:
    """The tokens of each choice of an answer."""
    assert isinstance(result, Collected), result
    deltas = result.deltas
    return [[token for one in deltas if one.choice == choice for token in one.token_ids] for choice in range(COUNT)]


def refused(result: Collected | Failure) -> Failure:
    assert isinstance(result, Failure)
    return result


def test_the_choices_go_to_one_worker_in_one_message() -> None:
    async def play(a: BareWorker, b: BareWorker) -> None:
        assert await submitted(a) == [(1, COUNT, 0)]
        a.begin(1, 2, 3)
        for stream_id in (1, 2, 3):
            a.tokens(stream_id, 0, stream_id)
            a.finish(stream_id)
        await turns()
        assert (a.cancels.signals, b.session._streams._next_id) == (0, 1)

    assert answered(ask(play)) == [[1], [2], [3]]


def test_choices_that_are_refused_for_capacity_try_another_worker_together() -> None:
    async def play(a: BareWorker, b: BareWorker) -> None:
        await submitted(a)
        a.refuse(1, 2, 3)
        assert await submitted(b) == [(1, COUNT, 0)]
        b.begin(1, 2, 3)
        b.finish(1, 2, 3)

    assert answered(ask(play)) == [[], [], []]


def test_a_choice_whose_refusal_comes_late_claims_the_place_reserved_for_it_elsewhere() -> None:
    async def play(a: BareWorker, b: BareWorker) -> None:
        await submitted(a)
        a.refuse(2)
        assert await submitted(b) == [(1, COUNT, 0)]
        b.begin(1, 2, 3)
        b.tokens(1, 0, 7)
        b.tokens(3, 0, 9)
        await turns()
        a.refuse(1)
        await turns()
        a.refuse(3)
        b.tokens(2, 0, 8)
        b.finish(1, 2, 3)

    assert answered(ask(play)) == [[7], [8], [9]]


def test_choices_that_may_wait_for_room_go_on_alone() -> None:
    """A bug: they waited for room for all of them, of which no worker told them; only the first could have it."""

    async def play(a: BareWorker, b: BareWorker) -> None:
        await submitted(a)
        b.open()
        await b.sent()
        a.hear(goaway=worker_pb2.GoAway(grace=seconds_to_wire(5)))  # They may not move, and stay in its queue.
        a.refuse(1, 2, 3)
        assert await submitted(b) == [(2, 1, 0), (3, 1, 1)]
        b.finish(1)
        assert await submitted(b) == [(4, 1, 2)]
        b.begin(2, 3, 4)
        b.finish(2, 3, 4)

    assert answered(ask(play, WAIT_S, migration_limit=0)) == [[], [], []]


def test_choices_that_every_worker_refuses_leave_no_place_behind() -> None:
    async def play(a: BareWorker, b: BareWorker) -> None:
        for worker in (a, b):
            await submitted(worker)
            worker.refuse(1, 2, 3)
        await turns()
        assert [a.cancels.signals, b.cancels.signals] == [0, 0]

    assert refused(ask(play)).reason is Reason.OVERLOADED


def test_choices_that_the_second_worker_refuses_one_by_one_leave_no_place_behind() -> None:
    async def play(a: BareWorker, b: BareWorker) -> None:
        await submitted(a)
        a.refuse(1, 2, 3)
        await submitted(b)
        b.refuse(3)  # The request fails at once, and the other choices are cancelled.
        await turns()
        assert sorted((await b.sent()).cancels) == [1, 2]

    assert refused(ask(play)).reason is Reason.OVERLOADED


def test_each_choice_moves_alone_when_their_worker_is_lost_before_they_have_begun() -> None:
    async def play(a: BareWorker, b: BareWorker) -> None:
        await submitted(a)
        a.vanish()
        assert sorted(await submitted(b)) == [(1, 1, 0), (2, 1, 1), (3, 1, 2)]
        b.finish(1, 2, 3)

    assert answered(ask(play)) == [[], [], []]


def test_a_choice_that_lost_its_worker_gives_up_the_place_reserved_with_the_group() -> None:
    async def play(a: BareWorker, b: BareWorker) -> None:
        await submitted(a)
        a.refuse(1, 2)
        assert await submitted(b) == [(1, COUNT, 0)]
        a.vanish()
        await turns()
        message = await b.sent()
        assert list(message.cancels) == [3]
        assert [(one.stream_id, one.choices, one.request.choice) for one in message.submits] == [(4, 1, 2)]
        b.finish(1, 2, 4)

    assert answered(ask(play)) == [[], [], []]


def test_a_choice_that_is_refused_after_the_others_have_begun_goes_on_alone() -> None:
    async def play(a: BareWorker, b: BareWorker) -> None:
        await submitted(a)
        a.begin(1, 2)
        a.refuse(3)
        assert await submitted(b) == [(1, 1, 2)]
        b.finish(1)
        a.finish(1, 2)

    assert answered(ask(play)) == [[], [], []]


def test_choices_that_begin_after_another_was_refused_keep_no_place_elsewhere() -> None:
    async def play(a: BareWorker, b: BareWorker) -> None:
        await submitted(a)
        a.refuse(3)
        assert await submitted(b) == [(1, COUNT, 0)]
        a.begin(1, 2)
        assert sorted((await b.sent()).cancels) == [1, 2]
        b.finish(3)
        a.finish(1, 2)

    assert answered(ask(play)) == [[], [], []]


def test_a_choice_that_fails_for_another_reason_than_capacity_goes_on_alone() -> None:
    async def play(a: BareWorker, b: BareWorker) -> None:
        await submitted(a)
        a.refuse(2, reason=Reason.ENGINE_ERROR)
        assert await submitted(b) == [(1, 1, 1)]
        a.finish(1, 3)
        b.finish(1)
        await turns()
        assert a.cancels.signals == 0

    assert answered(ask(play)) == [[], [], []]


def test_a_choice_that_finishes_early_leaves_the_others_running() -> None:
    async def play(a: BareWorker, b: BareWorker) -> None:
        await submitted(a)
        a.begin(1, 2, 3)
        a.tokens(1, 0, 7)
        a.finish(1)
        await turns()
        assert (a.candidate.in_flight_count, a.cancels.signals) == (2, 0)
        a.tokens(2, 0, 8)
        a.finish(2, 3)

    assert answered(ask(play)) == [[7], [8], []]


def test_each_waiting_choice_gets_a_second_attempt_alone_when_the_worker_leaves() -> None:
    async def play(a: BareWorker, b: BareWorker) -> None:
        await submitted(a)
        a.hear(goaway=worker_pb2.GoAway(grace=seconds_to_wire(30)))
        assert sorted(await submitted(b)) == [(1, 1, 0), (2, 1, 1), (3, 1, 2)]
        a.refuse(1, 2, 3)
        b.finish(1, 2, 3)

    assert answered(ask(play)) == [[], [], []]


@pytest.mark.parametrize("has_begun", [False, True])
def test_every_choice_is_cancelled_when_the_client_disconnects(has_begun: bool) -> None:
    async def scenario() -> None:
        a = BareWorker("a")
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(outcome(layers_over(BareWorkers(a)), COUNT))
            await submitted(a)
            if has_begun:
                a.begin(1, 2)
            asking.cancel()
        assert sorted((await a.sent()).cancels) == [1, 2, 3]
        assert (a.cancels.signals, a.candidate.in_flight_count) == (3, 0)
        assert (a.candidate.capacity.is_full(COUNT), a.candidate.quarantined_until) == (False, 0.0)

    run_async(scenario())


def test_no_choice_starts_elsewhere_if_the_client_disconnects_in_the_turn_of_a_refusal() -> None:
    async def scenario() -> None:
        a = BareWorker("a")
        workers = [a]
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(outcome(layers_over(BareWorkers(a, b := BareWorker("b", slots=1))), COUNT))
            await submitted(a)
            a.refuse(1, 2, 3)
            asking.cancel()
        assert [one.candidate.in_flight_count for one in (*workers, b)] == [0, 0]
        assert b.session._streams._next_id == 1

    run_async(scenario())


def test_no_choice_is_sent_if_there_is_room_for_some_of_them_only() -> None:
    async def scenario() -> Failure:
        a = BareWorker("a")
        a.open()
        failure = refused(await outcome(layers_over(BareWorkers(a)), COUNT))
        assert a.candidate.in_flight_count == 1
        return failure

    assert run_async(scenario()).reason is Reason.OVERLOADED


def test_more_choices_than_any_worker_takes_are_an_invalid_request() -> None:
    async def scenario() -> Failure:
        return refused(await outcome(layers_over(BareWorkers(BareWorker("a"), BareWorker("b", slots=3))), 5))

    failure = run_async(scenario())

    assert (failure.reason, failure.param) == (Reason.INVALID_ARGUMENT, "n")
    assert "more than 4 " in failure.detail


class RandomWorker:
    """A worker that begins, refuses, continues and ends its requests at random, within the protocol."""

    def __init__(self, bare: BareWorker, rng: random.Random) -> None:
        self.bare = bare
        self._rng = rng
        self._queued: dict[int, int] = {}  # id → position of the next token
        self._running: dict[int, int] = {}

    @property
    def holds(self) -> int:
        return len(self._queued) + len(self._running)

    async def read(self) -> None:
        while self.bare.has_sent and not self.bare.session.is_lost:
            message = await self.bare.sent()
            for submit in message.submits:
                ids = range(submit.stream_id, submit.stream_id + max(submit.choices, 1))
                self._queued |= dict.fromkeys(ids, len(submit.request.generated_token_ids))
            for stream_id in message.cancels:
                self._queued.pop(stream_id, None)
                self._running.pop(stream_id, None)
        if self.bare.session.is_lost:  # A worker drops the requests of a session that ends, whoever has ended it.
            self._queued, self._running = {}, {}

    def act(self) -> None:
        """Take one random action; those that make progress are the likelier ones."""
        able = [(1, self._report)]
        if self._queued:
            able += [(5, self._begin), (1, self._refuse), (1, self._refuse_all)]
        if self._running:
            able += [(4, self._say), (3, self._finish), (1, self._fail)]
        weights, actions = zip(*able, strict=True)
        self._rng.choices(actions, weights)[0]()

    def _any(self, of: dict[int, int]) -> tuple[int, int]:
        """Remove a random id. Returns it with its position."""
        stream_id = self._rng.choice(list(of))
        return stream_id, of.pop(stream_id)

    def _report(self) -> None:
        self.bare.hear(load=worker_pb2.Load(ranks=[worker_pb2.RankLoad()]))

    def _begin(self) -> None:
        stream_id, self._running[stream_id] = self._any(self._queued)
        self.bare.begin(stream_id)

    def _refuse(self) -> None:
        self.bare.refuse(self._any(self._queued)[0])

    def _refuse_all(self) -> None:
        queued, self._queued = self._queued, {}
        self.bare.refuse(*queued)

    def _say(self) -> None:
        stream_id, position = self._any(self._running)
        self._running[stream_id] = position + 1
        self.bare.tokens(stream_id, position, 7)

    def _finish(self) -> None:
        self.bare.finish(self._any(self._running)[0])

    def _fail(self) -> None:
        self.bare.refuse(self._any(self._running)[0], reason=Reason.ENGINE_ERROR)

    def leave(self) -> None:
        """Leave with or without notice."""
        if self._rng.random() < 0.5:
            self.bare.vanish()
            self._queued, self._running = {}, {}
        else:
            self.bare.hear(goaway=worker_pb2.GoAway(grace=seconds_to_wire(30)))


async def history(rng: random.Random) -> list[RandomWorker]:
    """Run one request to its end with random events. Returns the workers."""
    workers = [RandomWorker(BareWorker(name, slots=2, places=rng.choice([1, 2])), rng) for name in "abc"]
    layer = layers_over(BareWorkers(*(one.bare for one in workers)))
    leaves_at, hangs_up_at, turn = rng.randrange(40), rng.choice([rng.randrange(20), None]), 0
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(outcome(layer, COUNT))
        while not asking.done():
            await turns(rng.randrange(4))
            turn += 1
            if turn == leaves_at:
                rng.choice(workers).leave()
            if turn == hangs_up_at:
                asking.cancel()
            for worker in rng.sample(workers, 2):
                await worker.read()
                worker.act()
    result = None if asking.cancelled() else asking.result()
    assert not (isinstance(result, Failure) and result.reason is Reason.INTERNAL)
    for worker in workers:
        await worker.read()
    return workers


@given(st.integers(0, 2**32))
@settings(max_examples=150)
def test_random_events_leave_no_stream_and_no_place_on_either_side(seed: int) -> None:
    """The sink asserts that positions have no gap."""
    for worker in run_async(history(random.Random(seed))):
        assert worker.bare.candidate.in_flight_count == 0
        assert worker.bare.session._streams._reserved == {}
        assert worker.holds == 0
        assert worker.bare.session.is_lost or worker.bare.candidate.quarantined_until == 0, (
            "the worker kept to the protocol"
        )
