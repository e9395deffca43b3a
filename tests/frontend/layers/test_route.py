"""Route: names the worker of each attempt, and remembers what became of it."""

import asyncio
import random
from typing import Any

import pytest

from services.core.choice_group import ChoiceGroup
from services.core.errors import Failure, Reason, RefusedFor
from services.frontend.layers.route import Route
from services.frontend.routing.load import Occupancy
from services.frontend.routing.thresholds import AdmissionConfig, BusyThresholds, Thresholds
from services.worker.engine import RankLoad
from tests.support.doubles import CARD, HANG, FakeWorker, FakeWorkers, Script, call_layer, make_request, run_async

FOREVER = float("inf")


BUSY = RankLoad(kv_blocks_used=9, kv_blocks_total=10, active_prefill_tokens=0)
CALM = RankLoad(kv_blocks_used=5, kv_blocks_total=10, active_prefill_tokens=0)
HALF = AdmissionConfig(is_on=True, thresholds=Thresholds(active_decode_blocks=0.5))


def route(script: Script, workers: FakeWorkers, config: AdmissionConfig = HALF) -> Route[FakeWorker]:
    return Route(script, workers, BusyThresholds(config), random.Random(0))


def routed_to(workers: FakeWorkers, **call: Any) -> str | None:
    script = Script([7])
    run_async(call_layer(route(script, workers), make_request(), **call))
    return script.calls[0].attempt.worker


def refusal(workers: FakeWorkers, **call: Any) -> Failure:
    with pytest.raises(Failure) as caught:
        routed_to(workers, **call)
    return caught.value


def test_takes_the_less_loaded_of_two() -> None:
    loads = FakeWorkers(FakeWorker("a", in_flight_count=3), FakeWorker("b", in_flight_count=1))

    assert routed_to(loads) == "b"


@pytest.mark.parametrize(
    "unfit",
    [
        FakeWorker("a", is_draining=True),
        FakeWorker("a", full=True),
        FakeWorker("a", quarantined_until=FOREVER),
        FakeWorker("a", reported=[BUSY]),
    ],
    ids=["draining", "full", "quarantined", "busy"],
)
def test_passes_by_workers_that_are(unfit: FakeWorker) -> None:
    assert routed_to(FakeWorkers(unfit, FakeWorker("b", in_flight_count=9))) == "b"


def test_passes_by_workers_that_the_call_excludes() -> None:
    workers = FakeWorkers(FakeWorker("a"), FakeWorker("b", in_flight_count=9))

    assert routed_to(workers, excluded=frozenset({"a"})) == "b"


def test_a_quarantined_worker_is_better_than_none() -> None:
    assert routed_to(FakeWorkers(FakeWorker("a", quarantined_until=FOREVER))) == "a"


def test_thresholds_act_only_where_admission_control_is_on() -> None:
    script, workers = Script([7]), FakeWorkers(FakeWorker("a", reported=[BUSY]))
    off = AdmissionConfig(thresholds=HALF.thresholds)

    run_async(call_layer(route(script, workers, off), make_request()))

    assert script.calls[0].attempt.worker == "a"


def test_all_full_or_busy_is_overloaded_and_says_when_to_come_back() -> None:
    occupancy = Occupancy(slots=2, places=1, running=2, waiting=1, service_s=10.0)
    busy = FakeWorker("a", reported=[BUSY], occupancy=occupancy)

    failure = refusal(FakeWorkers(busy, FakeWorker("b", full=True), FakeWorker("c", is_draining=True)))

    assert failure.reason is Reason.OVERLOADED
    assert failure.metadata["running"] == "2"
    assert failure.retry_after_s is not None
    assert 8 <= failure.retry_after_s <= 12


def test_a_call_that_lost_its_worker_goes_to_a_busy_one_where_there_is_no_other() -> None:
    busy, calm = FakeWorker("busy", reported=[BUSY]), FakeWorker("calm", in_flight_count=9, reported=[CALM])

    assert routed_to(FakeWorkers(busy), replacement_deadline=FOREVER) == "busy"
    assert routed_to(FakeWorkers(busy, calm), replacement_deadline=FOREVER) == "calm"
    assert refusal(FakeWorkers(busy)).reason is Reason.OVERLOADED


def test_what_is_set_while_it_runs_counts_for_the_next_request() -> None:
    busy, script = BusyThresholds(HALF), Script([7], [7])
    layer = Route(script, FakeWorkers(FakeWorker("a", reported=[BUSY])), busy, random.Random(0))

    with pytest.raises(Failure):
        run_async(call_layer(layer, make_request()))
    busy.set("m", Thresholds(active_decode_blocks=0.95))
    run_async(call_layer(layer, make_request()))

    assert [call.attempt.worker for call in script.calls] == ["a"]


def test_a_refused_request_meets_overloaded_though_the_refusing_worker_is_excluded() -> None:
    workers = FakeWorkers(FakeWorker("a", full=True))

    assert refusal(workers, excluded=frozenset({"a"})).reason is Reason.OVERLOADED


def test_no_worker_at_all_is_no_workers() -> None:
    assert refusal(FakeWorkers()).reason is Reason.NO_WORKERS


@pytest.mark.parametrize("reason", [Reason.DISCONNECTED, Reason.STALLED, Reason.PROTOCOL_VIOLATION, Reason.ENGINE_DEAD])
def test_quarantines_a_worker_that_is_to_blame(reason: Reason) -> None:
    workers = FakeWorkers(FakeWorker("a"))

    with pytest.raises(Failure):
        run_async(call_layer(route(Script([reason]), workers), make_request()))

    assert workers.quarantined == ["a"]


@pytest.mark.parametrize(
    "reason", [Reason.INVALID_ARGUMENT, Reason.ENGINE_ERROR, Reason.DEADLINE_EXCEEDED, Reason.CANCELLED]
)
def test_leaves_a_worker_alone_that_is_not_to_blame(reason: Reason) -> None:
    worker = FakeWorker("a")
    workers = FakeWorkers(worker)

    with pytest.raises(Failure):
        run_async(call_layer(route(Script([reason]), workers), make_request()))

    assert workers.quarantined == []
    assert worker == FakeWorker("a")


def test_marks_what_refused_for_capacity_as_full_and_what_is_leaving_as_draining() -> None:
    full, leaving = FakeWorker("a"), FakeWorker("b")
    for worker, reason in ((full, Reason.WORKER_AT_CAPACITY), (leaving, Reason.DRAINING)):
        with pytest.raises(Failure):
            run_async(call_layer(route(Script([reason]), FakeWorkers(worker)), make_request()))

    assert (full.full, leaving.is_draining) == (True, True)


def test_a_worker_where_a_request_waited_too_long_is_not_full() -> None:
    """A bug: each that gave up its place in a queue kept others from it for up to a second."""
    assert refused_for(RefusedFor.QUEUE_TIMEOUT) == FakeWorker("a")


def refused_for(cause: RefusedFor) -> FakeWorker:
    """What is left of such a refusal on the worker that gave it, to a request of three tokens."""
    failure, worker = Failure(Reason.WORKER_AT_CAPACITY, "full", metadata={"cause": cause}), FakeWorker("a")
    with pytest.raises(Failure):
        run_async(call_layer(route(Script([failure]), FakeWorkers(worker)), make_request((1, 2, 3))))
    return worker


def test_a_worker_where_too_many_tokens_wait_is_full_only_for_as_many_that_wait_for_room() -> None:
    """Not for new requests: only the worker knows whether they would have to wait, and tells them why not."""
    worker = refused_for(RefusedFor.QUEUE_TOKENS)

    assert (worker.full, worker.refused_tokens) == (False, 3)
    assert routed_to(FakeWorkers(FakeWorker("a", refused_tokens=1))) == "a"


@pytest.mark.parametrize(("tokens", "generated", "choice_group"), [(3, 0, None), (1, 2, None), (1, 0, ChoiceGroup(3))])
def test_who_waits_for_room_does_not_ask_it_again_and_again(
    tokens: int, generated: int, choice_group: ChoiceGroup | None
) -> None:
    """A request that lost its worker may come back to one that has refused it."""

    async def scenario() -> str | None:
        script, other = Script([7]), FakeWorker("b", in_flight_count=9)
        workers = FakeWorkers(FakeWorker("a", refused_tokens=3), other)
        request = make_request((1,) * tokens, generated_token_ids=(2,) * generated)
        await call_layer(route(script, workers), request, replacement_deadline=FOREVER, choice_group=choice_group)
        return script.calls[0].attempt.worker

    assert run_async(scenario()) == "b"


def test_but_does_where_it_is_shorter() -> None:
    workers = FakeWorkers(FakeWorker("a", refused_tokens=9), FakeWorker("b", in_flight_count=9))

    assert routed_to(workers, replacement_deadline=FOREVER) == "a"


@pytest.mark.parametrize(("said", "least", "most"), [(None, 1.0, 1.5), (10.0, 8.0, 12.0), (1e9, 40.0, 60.0)])
def test_what_a_worker_says_of_when_to_come_back_is_bounded_and_jittered(
    said: float | None, least: float, most: float
) -> None:
    refused = Failure(Reason.WORKER_AT_CAPACITY, "full", retry_after_s=said)

    with pytest.raises(Failure) as caught:
        run_async(call_layer(route(Script([refused]), FakeWorkers(FakeWorker("a"))), make_request()))

    assert caught.value.retry_after_s is not None
    assert least <= caught.value.retry_after_s <= most


def test_a_request_that_is_cancelled_leaves_no_mark_on_its_worker() -> None:
    async def scenario() -> FakeWorker:
        script, worker = Script([7, HANG]), FakeWorker("a")
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(call_layer(route(script, FakeWorkers(worker)), make_request()))
            await script.hanging.wait()
            asking.cancel()
        return worker

    assert run_async(scenario()) == FakeWorker("a")


def test_a_call_that_lost_its_worker_waits_for_another_woken_by_discovery() -> None:
    async def scenario() -> str | None:
        script, workers = Script([7]), FakeWorkers()
        deadline = asyncio.get_running_loop().time() + 60
        async with asyncio.TaskGroup() as group:
            group.create_task(call_layer(route(script, workers), make_request(), replacement_deadline=deadline))
            await wait_in_line(workers)
            workers.worker_set(CARD).add(FakeWorker("new"))
        return script.calls[0].attempt.worker

    assert run_async(scenario()) == "new"


async def wait_in_line(workers: FakeWorkers) -> None:
    """Until somebody waits for room."""
    while workers.worker_set(CARD).line.is_empty:
        await asyncio.sleep(0)


def test_and_gives_up_at_its_replacement_deadline() -> None:
    async def scenario() -> None:
        deadline = asyncio.get_running_loop().time() + 0.01
        await call_layer(route(Script(), FakeWorkers()), make_request(), replacement_deadline=deadline)

    with pytest.raises(Failure) as caught:
        run_async(scenario())
    assert caught.value.reason is Reason.NO_WORKERS
    assert caught.value.retry_after_s is not None
    assert 1 <= caught.value.retry_after_s <= 1.5


@pytest.mark.parametrize("cancelled", [[], ["first"]], ids=["all stay", "the first hangs up when it is called"])
def test_those_that_wait_are_served_in_order_and_none_takes_its_turn_away_with_it(cancelled: list[str]) -> None:
    async def scenario() -> list[str]:
        script = Script([HANG], [HANG], [HANG])
        workers = FakeWorkers(worker := FakeWorker("a", full=True))
        layer = route(script, workers)
        async with asyncio.TaskGroup() as group:
            tasks = {}
            for name in ("first", "second", "third"):
                asking = call_layer(layer, make_request(), request_id=name, replacement_deadline=FOREVER)
                tasks[name] = group.create_task(asking)
                await asyncio.sleep(0)
            worker.full = False
            workers.worker_set(CARD).on_news(worker)
            for name in cancelled:
                tasks[name].cancel()
            await script.hanging.wait()
            for task in tasks.values():
                task.cancel()
        return [call.request_id for call in script.calls][:1]

    assert run_async(scenario()) == ["second" if cancelled else "first"]


# The choices of a party


def test_the_first_of_a_party_chooses_a_worker_with_room_for_all_and_the_others_follow() -> None:
    small, large = FakeWorker("small", request_limit=2), FakeWorker("large", in_flight_count=5, request_limit=8)
    workers, choice_group = FakeWorkers(small, large), ChoiceGroup(3)

    assert routed_to(workers, choice_group=choice_group) == "large"
    large.full = True
    assert routed_to(workers, choice_group=choice_group) == "large"


def test_a_party_that_was_refused_leaves_room_for_single_requests() -> None:
    """A bug: who asked again and again for many answers at once kept everybody else from the places that were free."""
    worker = FakeWorker("a")
    workers = FakeWorkers(worker)

    with pytest.raises(Failure):
        run_async(
            call_layer(route(Script([Reason.WORKER_AT_CAPACITY]), workers), make_request(), choice_group=ChoiceGroup(3))
        )

    assert (worker.is_full(3), worker.is_full(2)) == (True, False)
    assert routed_to(workers) == "a"


def test_a_choice_whose_party_s_worker_is_gone_has_lost_it_too() -> None:
    failure = refusal(FakeWorkers(FakeWorker("b")), choice_group=ChoiceGroup(3, worker="a"))

    assert failure.reason is Reason.CANNOT_CONNECT


def test_what_is_left_of_a_party_goes_alone() -> None:
    workers, choice_group = FakeWorkers(FakeWorker("a", request_limit=1)), ChoiceGroup(3)
    choice_group.leave(2)
    script = Script([7])

    run_async(call_layer(route(script, workers), make_request(), choice_group=choice_group))

    assert script.calls[0].choice_group is None


def test_a_party_that_no_worker_is_large_enough_for_is_an_error_of_the_request() -> None:
    failure = refusal(FakeWorkers(FakeWorker("a", request_limit=2)), choice_group=ChoiceGroup(3))

    assert (failure.reason, failure.param) == (Reason.INVALID_ARGUMENT, "n")
