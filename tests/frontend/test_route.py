"""Route: names the worker of each attempt, and remembers what became of it."""

import asyncio
import random
from typing import Any

import pytest

from services.errors import Failure, Reason
from services.frontend.route import Route, choose
from tests.support import FakeWorker, FakeWorkers, Script, call_layer, make_request, run_async

FOREVER = float("inf")


def route(script: Script, workers: FakeWorkers) -> Route[FakeWorker]:
    return Route(script, workers, random.Random(0))


def routed_to(workers: FakeWorkers, **call: Any) -> str | None:
    script = Script([7])
    run_async(call_layer(route(script, workers), make_request(), **call))
    return script.calls[0].worker


def refusal(workers: FakeWorkers, **call: Any) -> Failure:
    with pytest.raises(Failure) as caught:
        routed_to(workers, **call)
    return caught.value


def test_takes_the_less_loaded_of_two() -> None:
    loads = FakeWorkers(FakeWorker("a", in_flight_count=3), FakeWorker("b", in_flight_count=1))

    assert routed_to(loads) == "b"


def test_choice_among_many_is_never_the_most_loaded() -> None:
    workers = [FakeWorker(str(load), in_flight_count=load) for load in range(5)]
    rng = random.Random(7)

    assert "4" not in {choose(workers, rng).key for _ in range(200)}


@pytest.mark.parametrize(
    "unfit",
    [FakeWorker("a", is_draining=True), FakeWorker("a", full=True), FakeWorker("a", quarantined_until=FOREVER)],
    ids=["draining", "full", "quarantined"],
)
def test_passes_by_workers_that_are(unfit: FakeWorker) -> None:
    assert routed_to(FakeWorkers(unfit, FakeWorker("b", in_flight_count=9))) == "b"


def test_passes_by_workers_that_the_call_excludes() -> None:
    workers = FakeWorkers(FakeWorker("a"), FakeWorker("b", in_flight_count=9))

    assert routed_to(workers, excluded=frozenset({"a"})) == "b"


def test_a_quarantined_worker_is_better_than_none() -> None:
    assert routed_to(FakeWorkers(FakeWorker("a", quarantined_until=FOREVER))) == "a"


def test_all_full_is_overloaded_and_says_when_to_come_back() -> None:
    failure = refusal(FakeWorkers(FakeWorker("a", full=True), FakeWorker("b", is_draining=True)))

    assert failure.reason is Reason.OVERLOADED
    assert failure.retry_after_s == 1.0


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


@pytest.mark.parametrize("reason", [Reason.INVALID_ARGUMENT, Reason.ENGINE_ERROR, Reason.DEADLINE_EXCEEDED])
def test_leaves_a_worker_alone_that_is_not_to_blame(reason: Reason) -> None:
    worker = FakeWorker("a")
    workers = FakeWorkers(worker)

    with pytest.raises(Failure):
        run_async(call_layer(route(Script([reason]), workers), make_request()))

    assert workers.quarantined == []
    assert worker == FakeWorker("a")


def test_marks_what_refused_for_capacity_as_full_and_what_is_leaving_as_draining() -> None:
    full, leaving = FakeWorker("a"), FakeWorker("b")
    for worker, reason, retry_after_s in ((full, Reason.WORKER_AT_CAPACITY, 1.0), (leaving, Reason.DRAINING, None)):
        with pytest.raises(Failure) as caught:
            run_async(call_layer(route(Script([reason]), FakeWorkers(worker)), make_request()))
        assert caught.value.retry_after_s == retry_after_s

    assert (full.full, leaving.is_draining) == (True, True)


def test_a_call_that_lost_its_worker_waits_for_another_woken_by_discovery() -> None:
    async def scenario() -> str | None:
        script, workers = Script([7]), FakeWorkers()
        deadline = asyncio.get_running_loop().time() + 60
        async with asyncio.TaskGroup() as group:
            group.create_task(call_layer(route(script, workers), make_request(), replacement_deadline=deadline))
            await workers.waiting.wait()
            workers.workers.append(FakeWorker("new"))
            workers.changed.set()
        return script.calls[0].worker

    assert run_async(scenario()) == "new"


def test_and_gives_up_at_its_replacement_deadline() -> None:
    async def scenario() -> None:
        deadline = asyncio.get_running_loop().time() + 0.01
        await call_layer(route(Script(), FakeWorkers()), make_request(), replacement_deadline=deadline)

    with pytest.raises(Failure) as caught:
        run_async(scenario())
    assert caught.value.reason is Reason.NO_WORKERS
