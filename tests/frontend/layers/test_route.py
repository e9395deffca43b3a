"""Route: chooses the worker of each attempt, and reports to routing how the attempt failed."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from services.core.call import Call
from services.core.choice_group import ChoiceGroup
from services.core.errors import Failure, Reason, RefusedFor
from services.core.generation.kept import Copy, Kept
from services.core.interface import Finish, Sink
from services.core.request import Request
from services.core.tenant import Tenant
from services.frontend.layers.route import Route
from services.frontend.routing.balancer import Balancer
from services.frontend.routing.candidate import Candidate
from services.frontend.routing.thresholds import AdmissionConfig, BusyThresholds, Thresholds
from services.rpc.codec import seconds_to_wire
from services.stubs import worker_pb2
from services.worker.engine import RankLoad
from tests.support.doubles import (
    CARD,
    HANG,
    FakePool,
    Script,
    Step,
    call_layer,
    fill,
    make_candidate,
    make_kept,
    make_request,
    make_room,
    run_async,
)

FOREVER = float("inf")

BUSY = RankLoad(kv_blocks_used=9, kv_blocks_total=10, active_prefill_tokens=0)
CALM = RankLoad(kv_blocks_used=5, kv_blocks_total=10, active_prefill_tokens=0)
HALF = AdmissionConfig(is_on=True, thresholds=Thresholds(active_decode_blocks=0.5))


def route(script: Script, workers: FakePool, config: AdmissionConfig = HALF) -> Route:
    return Route(script, workers, Balancer(BusyThresholds(config), random.Random(0)))


def is_untouched(worker: Candidate) -> bool:
    return not (worker.capacity.is_full(1, 10**9) or worker.is_draining or worker.quarantined_until)


def routed_to(workers: FakePool, **call: Any) -> str | None:
    script = Script([7])
    run_async(call_layer(route(script, workers), make_request(), **call))
    return script.calls[0].attempt.worker


def refusal(workers: FakePool, **call: Any) -> Failure:
    with pytest.raises(Failure) as caught:
        routed_to(workers, **call)
    return caught.value


def test_the_less_loaded_of_two_workers_is_chosen() -> None:
    loads = FakePool(make_candidate("a", in_flight_count=3), make_candidate("b", in_flight_count=1))

    assert routed_to(loads) == "b"


@pytest.mark.parametrize(
    "unfit",
    [
        make_candidate("a", is_draining=True),
        make_candidate("a", is_full=True),
        make_candidate("a", quarantined_until=FOREVER),
        make_candidate("a", ranks=[BUSY]),
    ],
    ids=["draining", "full", "quarantined", "busy"],
)
def test_a_loaded_worker_is_preferred_to_one_that_is_draining_full_quarantined_or_busy(unfit: Candidate) -> None:
    assert routed_to(FakePool(unfit, make_candidate("b", in_flight_count=9))) == "b"


def test_a_worker_that_the_call_excludes_is_not_chosen() -> None:
    workers = FakePool(make_candidate("a"), make_candidate("b", in_flight_count=9))

    assert routed_to(workers, excluded=frozenset({"a"})) == "b"


def test_a_quarantined_worker_is_chosen_if_there_is_no_other() -> None:
    assert routed_to(FakePool(make_candidate("a", quarantined_until=FOREVER))) == "a"


def test_thresholds_are_ignored_without_admission_control() -> None:
    script, workers = Script([7]), FakePool(make_candidate("a", ranks=[BUSY]))
    off = AdmissionConfig(thresholds=HALF.thresholds)

    run_async(call_layer(route(script, workers, off), make_request()))

    assert script.calls[0].attempt.worker == "a"


def test_a_call_is_overloaded_with_a_retry_after_if_all_workers_are_full_or_busy() -> None:
    load = worker_pb2.Load(running=2, waiting=1, service_time=seconds_to_wire(10.0))
    busy = make_candidate("a", slots=2, places=1, load=load, ranks=[BUSY])

    failure = refusal(FakePool(busy, make_candidate("b", is_full=True), make_candidate("c", is_draining=True)))

    assert failure.reason is Reason.OVERLOADED
    assert failure.metadata["running"] == "2"
    assert failure.retry_after_s is not None
    assert 8 <= failure.retry_after_s <= 12


def test_a_call_that_lost_its_worker_goes_to_a_busy_one_if_there_is_no_other() -> None:
    busy, calm = make_candidate("busy", ranks=[BUSY]), make_candidate("calm", in_flight_count=9, ranks=[CALM])

    assert routed_to(FakePool(busy), replacement_deadline=FOREVER) == "busy"
    assert routed_to(FakePool(busy, calm), replacement_deadline=FOREVER) == "calm"
    assert refusal(FakePool(busy)).reason is Reason.OVERLOADED


def test_a_threshold_set_at_run_time_counts_for_the_next_request() -> None:
    busy, script = BusyThresholds(HALF), Script([7], [7])
    layer = Route(script, FakePool(make_candidate("a", ranks=[BUSY])), Balancer(busy, random.Random(0)))

    with pytest.raises(Failure):
        run_async(call_layer(layer, make_request()))
    busy.set("m", Thresholds(active_decode_blocks=0.95))
    run_async(call_layer(layer, make_request()))

    assert [call.attempt.worker for call in script.calls] == ["a"]


def test_a_call_that_the_only_worker_refused_is_overloaded_although_that_worker_is_excluded() -> None:
    workers = FakePool(make_candidate("a", is_full=True))

    assert refusal(workers, excluded=frozenset({"a"})).reason is Reason.OVERLOADED


def test_a_call_without_any_worker_fails_with_no_workers() -> None:
    assert refusal(FakePool()).reason is Reason.NO_WORKERS


@pytest.mark.parametrize("reason", [Reason.DISCONNECTED, Reason.STALLED, Reason.PROTOCOL_VIOLATION, Reason.ENGINE_DEAD])
def test_a_worker_that_is_to_blame_for_a_failure_is_quarantined(reason: Reason) -> None:
    workers = FakePool(make_candidate("a"))

    with pytest.raises(Failure):
        run_async(call_layer(route(Script([reason]), workers), make_request()))

    assert workers.quarantined == ["a"]


@pytest.mark.parametrize(
    "reason", [Reason.INVALID_ARGUMENT, Reason.ENGINE_ERROR, Reason.DEADLINE_EXCEEDED, Reason.CANCELLED]
)
def test_a_worker_that_is_not_to_blame_is_not_quarantined(reason: Reason) -> None:
    worker = make_candidate("a")
    workers = FakePool(worker)

    with pytest.raises(Failure):
        run_async(call_layer(route(Script([reason]), workers), make_request()))

    assert workers.quarantined == []
    assert is_untouched(worker)


def test_a_worker_counts_as_full_after_a_refusal_for_capacity_and_as_draining_after_one_for_draining() -> None:
    full, leaving = make_candidate("a"), make_candidate("b")
    for worker, reason in ((full, Reason.WORKER_AT_CAPACITY), (leaving, Reason.DRAINING)):
        with pytest.raises(Failure):
            run_async(call_layer(route(Script([reason]), FakePool(worker)), make_request()))

    assert (full.capacity.is_full(), leaving.is_draining) == (True, True)


def test_a_worker_where_a_request_waited_too_long_is_not_full() -> None:
    """A bug: each request that left a queue kept others away from its place for up to a second."""
    assert is_untouched(refused_for(RefusedFor.QUEUE_TIMEOUT))


def test_a_refusal_keeps_away_the_tenant_whose_request_was_refused() -> None:
    worker, failure = make_candidate("a"), Failure(Reason.WORKER_AT_CAPACITY, "full", metadata={"cause": "capacity"})
    with pytest.raises(Failure):
        run_async(call_layer(route(Script([failure]), FakePool(worker)), make_request(), tenant=Tenant(name="heavy")))

    assert routed_to(FakePool(worker), tenant=Tenant(name="light")) == "a"
    assert refusal(FakePool(worker), tenant=Tenant(name="heavy")).reason is Reason.OVERLOADED


def refused_for(cause: RefusedFor) -> Candidate:
    """A worker that has refused a request of three prompt tokens for this cause."""
    failure, worker = Failure(Reason.WORKER_AT_CAPACITY, "full", metadata={"cause": cause}), make_candidate("a")
    with pytest.raises(Failure):
        run_async(call_layer(route(Script([failure]), FakePool(worker)), make_request((1, 2, 3))))
    return worker


def test_a_refusal_of_prompt_tokens_does_not_keep_new_requests_away() -> None:
    """Only the worker knows whether a new request would have to wait, and its refusal says why."""
    worker = refused_for(RefusedFor.QUEUE_TOKENS)

    assert [worker.capacity.is_full(1, tokens) for tokens in (0, 2, 3)] == [False, False, True]
    assert routed_to(FakePool(worker)) == "a"


def refusing(tokens: int) -> Candidate:
    """A worker that has refused to queue as many prompt tokens."""
    worker = make_candidate("a")
    worker.on_refused(RefusedFor.QUEUE_TOKENS, 1, tokens)
    return worker


@pytest.mark.parametrize(("tokens", "generated", "choice_group"), [(3, 0, None), (1, 2, None), (1, 0, ChoiceGroup(3))])
def test_a_waiting_call_avoids_a_worker_that_refused_as_many_prompt_tokens(
    tokens: int, generated: int, choice_group: ChoiceGroup | None
) -> None:
    """A call that lost its worker may return to a worker that refused it, so it must not ask again and again."""

    async def scenario() -> str | None:
        script, other = Script([7]), make_candidate("b", in_flight_count=9)
        workers = FakePool(refusing(3), other)
        request = make_request((1,) * tokens, generated_token_ids=(2,) * generated)
        await call_layer(route(script, workers), request, replacement_deadline=FOREVER, choice_group=choice_group)
        return script.calls[0].attempt.worker

    assert run_async(scenario()) == "b"


def test_a_waiting_call_with_fewer_prompt_tokens_than_were_refused_goes_to_that_worker() -> None:
    workers = FakePool(refusing(9), make_candidate("b", in_flight_count=9))

    assert routed_to(workers, replacement_deadline=FOREVER) == "a"


@pytest.mark.parametrize(("said", "least", "most"), [(None, 1.0, 1.5), (10.0, 8.0, 12.0), (1e9, 40.0, 60.0)])
def test_the_retry_after_of_a_workers_refusal_is_bounded_and_jittered(
    said: float | None, least: float, most: float
) -> None:
    refused = Failure(Reason.WORKER_AT_CAPACITY, "full", retry_after_s=said)

    with pytest.raises(Failure) as caught:
        run_async(call_layer(route(Script([refused]), FakePool(make_candidate("a"))), make_request()))

    assert caught.value.retry_after_s is not None
    assert least <= caught.value.retry_after_s <= most


def test_a_cancelled_request_changes_nothing_about_its_worker() -> None:
    async def scenario() -> Candidate:
        script, worker = Script([7, HANG]), make_candidate("a")
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(call_layer(route(script, FakePool(worker)), make_request()))
            await script.hanging.wait()
            asking.cancel()
        return worker

    assert is_untouched(run_async(scenario()))


def test_a_call_that_lost_its_worker_waits_until_another_worker_comes() -> None:
    async def scenario() -> str | None:
        script, workers = Script([7]), FakePool()
        deadline = asyncio.get_running_loop().time() + 60
        async with asyncio.TaskGroup() as group:
            group.create_task(call_layer(route(script, workers), make_request(), replacement_deadline=deadline))
            await until_waiting(workers)
            workers.worker_set(CARD).add(make_candidate("new"))
        return script.calls[0].attempt.worker

    assert run_async(scenario()) == "new"


async def until_waiting(workers: FakePool) -> None:
    """Wait until a call waits for room."""
    while workers.worker_set(CARD).wait_queue.is_empty:
        await asyncio.sleep(0)


def test_a_call_that_waits_for_a_worker_fails_with_no_workers_at_its_replacement_deadline() -> None:
    async def scenario() -> None:
        deadline = asyncio.get_running_loop().time() + 0.01
        await call_layer(route(Script(), FakePool()), make_request(), replacement_deadline=deadline)

    with pytest.raises(Failure) as caught:
        run_async(scenario())
    assert caught.value.reason is Reason.NO_WORKERS
    assert caught.value.retry_after_s is not None
    assert 1 <= caught.value.retry_after_s <= 1.5


@pytest.mark.parametrize("cancelled", [[], ["first"]], ids=["all stay", "the first hangs up when it is called"])
def test_waiting_calls_get_room_in_order_and_a_woken_call_that_is_cancelled_wakes_the_next(
    cancelled: list[str],
) -> None:
    async def scenario() -> list[str]:
        script = Script([HANG], [HANG], [HANG])
        workers = FakePool(worker := make_candidate("a", is_full=True))
        layer = route(script, workers)
        async with asyncio.TaskGroup() as group:
            tasks = {}
            for name in ("first", "second", "third"):
                asking = call_layer(layer, make_request(), request_id=name, replacement_deadline=FOREVER)
                tasks[name] = group.create_task(asking)
                await asyncio.sleep(0)
            make_room(worker)
            workers.worker_set(CARD).on_change(worker)
            for name in cancelled:
                tasks[name].cancel()
            await script.hanging.wait()
            for task in tasks.values():
                task.cancel()
        return [call.request_id for call in script.calls][:1]

    assert run_async(scenario()) == ["second" if cancelled else "first"]


# Choice groups


def test_the_first_choice_of_a_group_chooses_a_worker_with_room_for_all_and_the_others_follow() -> None:
    small, large = make_candidate("small", slots=2), make_candidate("large", in_flight_count=5, slots=8)
    workers, choice_group = FakePool(small, large), ChoiceGroup(3)

    assert routed_to(workers, choice_group=choice_group) == "large"
    fill(large)
    assert routed_to(workers, choice_group=choice_group) == "large"


def test_a_worker_that_refused_a_group_takes_single_requests() -> None:
    """A bug: a client that kept asking for many choices kept all other requests away from free slots."""
    worker = make_candidate("a")
    workers = FakePool(worker)

    with pytest.raises(Failure):
        run_async(
            call_layer(route(Script([Reason.WORKER_AT_CAPACITY]), workers), make_request(), choice_group=ChoiceGroup(3))
        )

    assert (worker.capacity.is_full(3), worker.capacity.is_full(2)) == (True, False)
    assert routed_to(workers) == "a"


def test_a_choice_cannot_connect_if_the_worker_of_its_group_is_lost() -> None:
    failure = refusal(FakePool(make_candidate("b")), choice_group=ChoiceGroup(3, worker="a"))

    assert failure.reason is Reason.CANNOT_CONNECT


def test_a_choice_whose_group_lost_a_choice_goes_alone() -> None:
    workers, choice_group = FakePool(make_candidate("a", slots=1)), ChoiceGroup(3)
    choice_group.leave(2)
    script = Script([7])

    run_async(call_layer(route(script, workers), make_request(), choice_group=choice_group))

    assert script.calls[0].choice_group is None


def test_a_group_larger_than_every_workers_request_limit_is_an_invalid_request() -> None:
    failure = refusal(FakePool(make_candidate("a", slots=2)), choice_group=ChoiceGroup(3))

    assert (failure.reason, failure.param) == (Reason.INVALID_ARGUMENT, "n")


# Answers that are resumed


def copies_of(*sessions: str) -> list[Copy]:
    return [Copy(session=one, token_count=0, is_over=False, discard=lambda: None) for one in sessions]


class AdoptingScript(Script):
    """`adopted`: the session that each attempt adopts from; None for a new request."""

    def __init__(self, *takes: Sequence[Step]) -> None:
        super().__init__(*takes)
        self.adopted: list[str | None] = []

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        self.adopted.append(None if call.attempt.adopts is None else call.attempt.adopts.session)
        return await super().__call__(request, call, sink)


def adopting(workers: FakePool, kept: Kept, *takes: Sequence[Step], choice: int = 0) -> AdoptingScript:
    """The script after one call for each take."""
    script = AdoptingScript(*takes)

    async def scenario() -> None:
        for _ in takes:
            try:
                await call_layer(route(script, workers), make_request(choice=choice), kept=kept)
            except Failure:
                continue

    run_async(scenario())
    return script


def test_choice_that_a_worker_has_already_is_adopted_there() -> None:
    kept = make_kept(first_index=4)
    kept.generation.copies = {5: copies_of("b"), 1: copies_of("a")}

    script = adopting(FakePool(make_candidate("a"), make_candidate("b", in_flight_count=9)), kept, [7], choice=1)

    assert (script.calls[0].attempt.worker, script.adopted) == ("b", ["b"])
    assert [len(copies) for copies in kept.generation.copies.values()] == [0, 1]


@pytest.mark.parametrize("state", ["is_full", "is_draining"])
def test_choice_is_adopted_from_a_worker_that_takes_no_requests(state: str) -> None:
    """Its slot is taken already, and no other worker has the answer."""
    kept = make_kept()
    kept.generation.copies = {0: copies_of("a")}

    script = adopting(
        FakePool(
            make_candidate("a", is_full=state == "is_full", is_draining=state == "is_draining"), make_candidate("b")
        ),
        kept,
        [7],
    )

    assert script.calls[0].attempt.worker == "a"


def test_choice_that_no_worker_has_is_sent_as_a_new_one() -> None:
    kept = make_kept()
    kept.generation.copies = {1: copies_of("b")}

    script = adopting(FakePool(make_candidate("a")), kept, [7])

    assert (script.calls[0].attempt.worker, script.adopted) == ("a", [None])


def test_adoption_is_asked_for_once_and_the_next_attempt_is_a_new_request() -> None:
    kept = make_kept()
    kept.generation.copies = {0: copies_of("a")}

    script = adopting(FakePool(make_candidate("a"), make_candidate("b")), kept, [7, Reason.DISCONNECTED], [8])

    assert script.adopted == ["a", None]
    assert script.calls[1].attempt.worker == "b", "the first one is quarantined"


def test_next_best_record_is_adopted_if_the_best_one_was_discarded_meanwhile() -> None:
    kept = make_kept()
    kept.generation.copies = {0: copies_of("a", "gone", "b")}
    script = AdoptingScript([Reason.STREAM_NOT_FOUND], [7])

    run_async(call_layer(route(script, FakePool(make_candidate("a"), make_candidate("b"))), make_request(), kept=kept))

    assert script.adopted == ["a", "b"]


def test_last_record_that_was_discarded_ends_the_request() -> None:
    """It is not computed again: somebody has cancelled the answer, or has all of it."""
    kept = make_kept()
    kept.generation.copies = {0: copies_of("a")}
    script = AdoptingScript([Reason.STREAM_NOT_FOUND], [7])

    with pytest.raises(Failure) as caught:
        run_async(call_layer(route(script, FakePool(make_candidate("a"))), make_request(), kept=kept))

    assert caught.value.reason is Reason.STREAM_NOT_FOUND
    assert script.adopted == ["a"]


def test_next_record_is_adopted_by_the_next_attempt_unless_there_are_tokens_of_the_first() -> None:
    """Those of another record need not follow them: engines that draw without seeds draw anew after a move."""
    for generated, expected in (((), "b"), ((7,), None)):
        kept = make_kept()
        kept.generation.copies = {0: copies_of("b")}
        script = AdoptingScript([8])
        request = make_request(generated_token_ids=generated)

        run_async(call_layer(route(script, FakePool(make_candidate("a"), make_candidate("b"))), request, kept=kept))

        assert script.adopted == [expected]


def test_adoption_from_a_worker_that_was_lost_fails_as_a_lost_worker_does_and_the_next_attempt_chooses() -> None:
    kept = make_kept()
    kept.generation.copies = {0: copies_of("gone")}
    workers = FakePool(make_candidate("a"))
    with pytest.raises(Failure) as caught:
        run_async(call_layer(route(Script(), workers), make_request(), kept=kept))
    assert caught.value.reason is Reason.DISCONNECTED

    script = adopting(workers, kept, [7])

    assert (script.calls[0].attempt.worker, script.adopted) == ("a", [None])
