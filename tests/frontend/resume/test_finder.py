"""Finder: asks all workers for an answer, takes each choice from the one that is furthest, and is one of one winner."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from services.core.call import Call
from services.core.errors import Failure, Reason
from services.core.generation.kept import EPOCH_BITS, Generation, Kept
from services.core.generation.presentation import Presentation, encode_presentation
from services.core.request import Continuation
from services.core.tenant import EVERYBODY, Tenant
from services.frontend.resume.finder import LOCATE_S_MAX, GenerationFinder
from services.frontend.session.session import WorkerSession
from services.stubs import worker_pb2
from tests.frontend.support import BareWorker
from tests.support.clock import pass_time, run_clocked, settle
from tests.support.doubles import make_request

ID = bytes(range(16))


def call_of(**call: Any) -> Call:
    return Call(request_id="r", kept=Kept(generation=Generation(ID, 12.0, is_told=True)), **call)


def presentation(**call: Any) -> bytes:
    return encode_presentation(make_request(n=4, max_tokens=9), call_of(**call), b"form")


def sessions_of(generation: Generation) -> dict[int, list[str]]:
    """The sessions of each choice's copies, the best one first."""
    return {index: [copy.session for copy in copies] for index, copies in generation.copies.items()}


def holding(index: int = 0, token_count: int = 0, epoch: int = 1, **state: Any) -> worker_pb2.Holding:
    return worker_pb2.Holding(index=index, token_count=token_count, epoch=epoch, **state)


class Pool:
    """The sessions of a frontend. `unreached`: workers that are not known yet, or that it has not reached."""

    def __init__(self, *workers: BareWorker, unreached: int = 0) -> None:
        self.workers = list(workers)
        self._unreached_count = unreached
        self.next_change = asyncio.Event()

    def all_sessions(self) -> list[WorkerSession]:
        return [worker.session for worker in self.workers]

    @property
    def has_all(self) -> bool:
        return not self._unreached_count

    def reach(self, worker: BareWorker) -> None:
        self.workers.append(worker)
        self._unreached_count -= 1
        changed, self.next_change = self.next_change, asyncio.Event()
        changed.set()


async def asked(worker: BareWorker) -> worker_pb2.Locate:
    """The next question to the worker."""
    (locate,) = (await worker.sent()).locates
    return locate


async def reply(worker: BareWorker, *holdings: worker_pb2.Holding, **located: Any) -> worker_pb2.Locate:
    locate = await asked(worker)
    if holdings:
        located = {"presentation": presentation()} | located
    worker.hear(located=[worker_pb2.Located(query=locate.query, holdings=holdings, **located)])
    return locate


async def discarded(worker: BareWorker) -> list[tuple[int, int]]:
    """(index, epoch) of what the worker was told to hand over and to cancel."""
    await settle()
    if not worker.has_sent:
        return []
    sent = await worker.sent()
    assert list(sent.cancels) == [adopt.stream_id for adopt in sent.adopts]
    return [(adopt.index, adopt.epoch) for adopt in sent.adopts]


Script = Callable[[Pool], Awaitable[None]]


async def find(pool: Pool, script: Script, seed: int = 0) -> tuple[Presentation, Generation]:
    finding = asyncio.ensure_future(GenerationFinder(pool, random.Random(seed)).find(ID, EVERYBODY))
    await script(pool)
    return await finding


def refusal(make_pool: Callable[[], Pool], script: Script) -> Failure:
    async def scenario() -> Failure:
        with pytest.raises(Failure) as caught:
            await find(make_pool(), script)
        return caught.value

    return run_clocked(scenario())


# What is found


def test_an_answer_is_found_with_its_presentation_wherever_it_is() -> None:
    async def scenario() -> None:
        other, holder = BareWorker("a"), BareWorker("b")

        async def script(pool: Pool) -> None:
            assert (await reply(other)).generation_id == ID
            await reply(holder, holding())

        found, generation = await find(Pool(other, holder), script)
        assert found.request == make_request(n=4, max_tokens=9)
        assert (generation.id, generation.grace_s, generation.presentation) == (ID, 12.0, presentation())
        assert generation.is_told
        assert generation.is_resumed
        assert sessions_of(generation) == {0: [holder.session.key]}

    run_clocked(scenario())


FINISHED, FAILED = {"is_finished": True}, {"has_failed": True}


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (holding(token_count=9), holding(token_count=8)),
        (holding(token_count=8, **FINISHED), holding(token_count=8)),
        (holding(token_count=8, **FINISHED), holding(token_count=9)),
        (holding(token_count=0), holding(token_count=9, **FAILED)),
        (holding(token_count=9, **FAILED), holding(token_count=8, **FAILED)),
    ],
    ids=["further", "finished", "finished before further", "not failed", "further of failed ones"],
)
@pytest.mark.parametrize("is_better_first", [True, False])
def test_choice_is_taken_from_the_worker_that_is_furthest_and_discarded_elsewhere_once_it_has_come(
    better: worker_pb2.Holding, worse: worker_pb2.Holding, is_better_first: bool
) -> None:
    async def scenario() -> None:
        holder, loser = BareWorker("a"), BareWorker("b")

        async def script(pool: Pool) -> None:
            replies = [(holder, better), (loser, worse)]
            for worker, one in replies if is_better_first else reversed(replies):
                await reply(worker, one)

        _, generation = await find(Pool(holder, loser), script)
        assert sessions_of(generation) == {0: [holder.session.key, loser.session.key]}
        best = generation.take_copy(0)
        assert best is not None
        assert (best.token_count, best.is_over) == (better.token_count, better.is_finished or better.has_failed)
        assert generation.record_ends == {0: better.token_count}
        assert await discarded(loser) == [], "its session may still be lost, or another frontend take its record"
        generation.drop_others(0)
        assert await discarded(loser) == [(0, generation.epoch)]
        assert await discarded(holder) == []

    run_clocked(scenario())


def test_what_a_choice_has_lost_by_moving_is_known() -> None:
    async def scenario() -> None:
        holder = BareWorker("a")

        async def script(pool: Pool) -> None:
            moved, later = (holding(index, continuation=index) for index in (1, 2))
            await reply(holder, holding(), moved, later)

        _, generation = await find(Pool(holder), script)
        assert generation.continuations == {1: Continuation.PREFIX}, "a number of a later version says nothing"

    run_clocked(scenario())


def test_each_choice_is_taken_from_its_own_worker() -> None:
    async def scenario() -> None:
        first, second = BareWorker("a"), BareWorker("b")

        async def script(pool: Pool) -> None:
            await reply(first, holding(0, 5), holding(1, 1))
            await reply(second, holding(1, 2), holding(3, 7))

        _, generation = await find(Pool(first, second), script)
        keys = first.session.key, second.session.key
        assert sessions_of(generation) == {0: [keys[0]], 1: [keys[1], keys[0]], 3: [keys[1]]}

    run_clocked(scenario())


def test_two_frontends_choose_the_same_of_two_equal_holders() -> None:
    """A bug: each took the first to reply, and discarded the other's."""

    async def chosen(order: tuple[str, str]) -> str:
        workers = {name: BareWorker(name) for name in order}

        async def script(pool: Pool) -> None:
            for name in order:
                await reply(workers[name], holding(token_count=4))

        _, generation = await find(Pool(*workers.values()), script)
        return sessions_of(generation)[0][0].partition("#")[0]

    assert run_clocked(chosen(("a", "b"))) == run_clocked(chosen(("b", "a")))


# Epochs


@pytest.mark.parametrize("known", [1, 7, 2**32 + 5, 2**60])
def test_epoch_is_higher_than_every_one_that_was_found(known: int) -> None:
    async def scenario(seed: int) -> int:
        one, two = BareWorker("a"), BareWorker("b")

        async def script(pool: Pool) -> None:
            await reply(one, holding(0, 5))
            await reply(two, holding(1, 2, epoch=known))

        return (await find(Pool(one, two), script, seed))[1].epoch

    epochs = [run_clocked(scenario(seed)) for seed in range(4)]

    assert all(known < epoch < 2**64 for epoch in epochs)
    assert {epoch >> EPOCH_BITS for epoch in epochs} == {(known >> EPOCH_BITS) + 1}
    assert len(set(epochs)) == 4, "of two at the same time, one is higher on all workers"


# Answers that are not found


async def nothing(pool: Pool) -> None:
    """No worker has it: each is asked twice, as one may have come in between."""
    for _ in range(2):
        for worker in pool.workers:
            await reply(worker)


async def expired(pool: Pool) -> None:
    for _ in range(2):
        for number, worker in enumerate(pool.workers):
            await reply(worker, is_expired=number == 1)


def test_an_answer_that_no_worker_has_does_not_exist() -> None:
    failure = refusal(lambda: Pool(BareWorker("a"), BareWorker("b")), nothing)

    assert failure.reason is Reason.STREAM_NOT_FOUND


def test_an_answer_whose_grace_is_over_on_one_worker_has_expired() -> None:
    failure = refusal(lambda: Pool(BareWorker("a"), BareWorker("b")), expired)

    assert failure.reason is Reason.STREAM_EXPIRED


async def unreached(pool: Pool) -> None:
    for worker in pool.workers:
        await reply(worker)
    await settle()
    pass_time(LOCATE_S_MAX)
    for worker in pool.workers:
        await reply(worker)


@pytest.mark.parametrize("count", [0, 1])
def test_while_a_worker_is_not_reached_the_answer_may_be_there(count: int) -> None:
    failure = refusal(lambda: Pool(*(BareWorker("a") for _ in range(count)), unreached=1), unreached)

    assert failure.reason is Reason.NO_WORKERS
    assert failure.traits.retryable
    assert failure.retry_after_s is not None


def test_worker_that_is_reached_meanwhile_is_asked() -> None:
    async def scenario() -> None:
        early, late = BareWorker("a"), BareWorker("b")

        async def script(pool: Pool) -> None:
            await reply(early)
            await settle()
            pool.reach(late)
            await reply(early)
            await reply(late, holding())

        _, generation = await find(Pool(early, unreached=1), script)
        assert sessions_of(generation) == {0: [late.session.key]}

    run_clocked(scenario())


def test_whole_answer_does_not_wait_for_workers_that_are_not_reached() -> None:
    async def scenario() -> None:
        holder = BareWorker("a")

        async def script(pool: Pool) -> None:
            await reply(holder, *(holding(index) for index in range(4)))

        _, generation = await find(Pool(holder, unreached=1), script)
        assert sessions_of(generation) == {index: [holder.session.key] for index in range(4)}

    run_clocked(scenario())


def test_choice_that_is_missing_may_be_on_a_worker_that_is_not_reached_yet() -> None:
    """A bug: it was computed again, although its worker lived."""

    async def scenario() -> None:
        early, late = BareWorker("a"), BareWorker("b")

        async def script(pool: Pool) -> None:
            await reply(early, holding(0))
            await settle()
            pool.reach(late)
            await reply(early, holding(0))
            await reply(late, holding(1))

        _, generation = await find(Pool(early, unreached=1), script)
        assert sessions_of(generation) == {0: [early.session.key], 1: [late.session.key]}

    run_clocked(scenario())


def test_choice_that_is_missing_is_waited_for_no_longer_than_the_bound() -> None:
    async def scenario() -> None:
        holder = BareWorker("a")

        async def script(pool: Pool) -> None:
            await reply(holder, holding(0))
            await settle()
            pass_time(LOCATE_S_MAX)
            await reply(holder, holding(0))

        _, generation = await find(Pool(holder, unreached=1), script)
        assert sessions_of(generation) == {0: [holder.session.key]}

    run_clocked(scenario())


def test_worker_that_does_not_reply_in_time_is_left_out_if_another_has_the_answer() -> None:
    async def scenario() -> None:
        holder, silent = BareWorker("a"), BareWorker("b")

        async def script(pool: Pool) -> None:
            await reply(holder, holding())
            await asked(silent)
            pass_time(LOCATE_S_MAX)

        _, generation = await find(Pool(holder, silent), script)
        assert sessions_of(generation) == {0: [holder.session.key]}

    run_clocked(scenario())


async def silence(pool: Pool) -> None:
    for _ in range(2):
        for worker in pool.workers:
            await asked(worker)
        pass_time(LOCATE_S_MAX)
        await settle()


def test_worker_that_does_not_reply_in_time_may_have_the_answer() -> None:
    assert refusal(lambda: Pool(BareWorker("a")), silence).reason is Reason.NO_WORKERS


async def loss(pool: Pool) -> None:
    await asked(pool.workers[0])
    lost = pool.workers.pop()
    lost.vanish()


def test_worker_that_is_lost_while_it_is_asked_has_nothing() -> None:
    assert refusal(lambda: Pool(BareWorker("a")), loss).reason is Reason.STREAM_NOT_FOUND


def test_reply_that_comes_too_late_is_ignored() -> None:
    async def scenario() -> None:
        late = BareWorker("a")

        async def script(pool: Pool) -> None:
            locate = await asked(late)
            pass_time(LOCATE_S_MAX)
            await settle()
            late.hear(located=[worker_pb2.Located(query=locate.query, holdings=[holding()])])
            await reply(late)

        with pytest.raises(Failure) as caught:
            await find(Pool(late), script)
        assert caught.value.reason is Reason.STREAM_NOT_FOUND
        assert not late.session.is_lost

    run_clocked(scenario())


# What workers cannot have


BEYOND = 2**32 - 1
MALFORMED: dict[str, tuple[list[worker_pb2.Holding], dict[str, Any]]] = {
    "a choice that the answer does not have": ([holding(4)], {}),
    "a choice twice": ([holding(1), holding(1, 3)], {}),
    "more tokens than the answer may have": ([holding(token_count=BEYOND)], {}),
    "an epoch that is yet to come": ([holding(epoch=2**64 - 1)], {}),
    "no presentation": ([holding()], {"presentation": b""}),
    "the presentation of another version": ([holding()], {"presentation": b"later"}),
    "a request that was not prepared": (
        [holding()],
        {"presentation": encode_presentation(make_request(token_ids=None, text="x"), call_of(), b"")},
    ),
    "too many answers": ([holding()], {"presentation": encode_presentation(make_request(n=10**9), call_of(), b"")}),
}


@pytest.mark.parametrize(("holdings", "located"), MALFORMED.values(), ids=MALFORMED)
def test_worker_that_says_what_cannot_be_is_refused_and_nothing_is_discarded(
    holdings: list[worker_pb2.Holding], located: dict[str, Any]
) -> None:
    async def scenario() -> None:
        rogue = BareWorker("a")

        async def script(pool: Pool) -> None:
            await reply(rogue, *holdings, **located)

        with pytest.raises(Failure) as caught:
            await find(Pool(rogue), script)
        assert caught.value.reason is Reason.PROTOCOL_VIOLATION
        assert await discarded(rogue) == []

    run_clocked(scenario())


@pytest.mark.parametrize(("holdings", "located"), MALFORMED.values(), ids=MALFORMED)
def test_answer_is_taken_from_another_worker_if_one_says_what_cannot_be(
    holdings: list[worker_pb2.Holding], located: dict[str, Any]
) -> None:
    async def scenario() -> None:
        rogue, holder = BareWorker("a"), BareWorker("b")

        async def script(pool: Pool) -> None:
            await reply(rogue, *holdings, **located)
            await reply(holder, holding(0, 3))

        _, generation = await find(Pool(rogue, holder), script)
        assert sessions_of(generation) == {0: [holder.session.key]}
        assert generation.epoch < 2**63

    run_clocked(scenario())


def test_records_of_an_older_answer_with_the_same_id_are_not_taken_and_are_discarded() -> None:
    """A request that repeats an id begins anew, perhaps on another worker than the answer before it."""

    async def scenario() -> None:
        old, new = BareWorker("a"), BareWorker("b")

        async def script(pool: Pool) -> None:
            await reply(old, holding(token_count=5), presentation=presentation(migration_limit=1))
            await reply(new, holding(token_count=2, epoch=2))

        found, generation = await find(Pool(old, new), script)
        assert found.migration_limit is None
        assert sessions_of(generation) == {0: [new.session.key]}
        generation.drop_others(0)
        assert await discarded(old) == [(0, generation.epoch)]

    run_clocked(scenario())


def test_workers_know_an_answer_by_an_id_of_its_tenants_own() -> None:
    async def id_for(tenant: Tenant) -> bytes:
        worker = BareWorker("a")
        finding = asyncio.ensure_future(GenerationFinder(Pool(worker), random.Random(0)).find(ID, tenant))
        located = await reply(worker, holding())
        _, generation = await finding
        assert located.generation_id == generation.id
        assert generation.name == ID.hex(), "its client knows it by the id that it chose"
        return generation.id

    acme, other, nobody = [run_clocked(id_for(tenant)) for tenant in (Tenant(name="acme"), Tenant(name="b"), EVERYBODY)]

    assert nobody == ID
    assert len({acme, other, nobody}) == 3
    assert acme == run_clocked(id_for(Tenant(name="acme", weight=2.0)))


# Cancel


@pytest.mark.parametrize("counts", [(0, 0), (0, 2), (1, 1)])
def test_cancel_asks_all_workers_to_end_what_they_have(counts: tuple[int, int]) -> None:
    async def scenario() -> bool:
        pool = Pool(BareWorker("a"), BareWorker("b"))
        cancelling = asyncio.ensure_future(GenerationFinder(pool, random.Random(0)).cancel(ID, EVERYBODY))
        for worker, count in zip(pool.workers, counts, strict=True):
            assert (await reply(worker, cancelled=count)).cancels
        return await cancelling

    assert run_clocked(scenario()) is (sum(counts) > 0)
