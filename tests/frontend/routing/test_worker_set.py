"""Worker set: a worker that was left out is open again after every change that may give it room, and not before."""

import asyncio
import random

import pytest

from services.core.errors import Failure, RefusedFor
from services.frontend.routing.candidate import Candidate
from services.frontend.routing.thresholds import Thresholds
from services.frontend.routing.worker_set import WorkerSet
from services.frontend.session.session import WorkerSessionConfig
from services.frontend.session.stream import Stream
from services.stubs.worker_pb2 import Load, RankLoad
from tests.frontend.support import BareWorker, BareWorkers
from tests.support.doubles import CARD, make_candidate, run_async

HALF = Thresholds(active_decode_blocks=0.5)


def worker_set_of(*names: str) -> tuple[WorkerSet, dict[str, Candidate]]:
    worker_set = WorkerSet(CARD)
    workers = {name: make_candidate(name) for name in names}
    for one in workers.values():
        worker_set.add(one)
    return worker_set, workers


def open_in(worker_set: WorkerSet) -> str:
    return "".join(sorted(one.key for one in worker_set.open))


def busy_in(worker_set: WorkerSet) -> str:
    return "".join(sorted(one.key for one in worker_set.busy))


def test_a_worker_that_is_left_out_stays_in_the_set_and_is_open_again_after_a_change() -> None:
    worker_set, workers = worker_set_of("a", "b", "c")

    worker_set.leave_out(workers["a"])
    assert (open_in(worker_set), len(worker_set)) == ("bc", 3)
    worker_set.on_change(workers["a"])
    assert open_in(worker_set) == "abc"


def test_leaving_a_worker_out_and_reporting_its_change_are_idempotent() -> None:
    worker_set, workers = worker_set_of("a", "b")

    for _ in range(2):
        worker_set.leave_out(workers["a"])
    assert open_in(worker_set) == "b"
    for _ in range(2):
        worker_set.on_change(workers["a"])
    assert open_in(worker_set) == "ab"


def test_a_change_of_a_removed_worker_is_ignored() -> None:
    worker_set, workers = worker_set_of("a", "b")

    worker_set.remove(workers["a"])
    worker_set.on_change(workers["a"])

    assert (open_in(worker_set), [one.key for one in worker_set]) == ("b", ["b"])


def test_a_change_or_a_new_worker_wakes_a_waiting_request() -> None:
    worker_set, workers = worker_set_of("a")

    with worker_set.wait_queue.join() as waiter:
        worker_set.on_change(workers["a"])
        assert waiter.is_woken
        waiter.wait_again(is_room_left=False)
        worker_set.add(make_candidate("b"))
        assert waiter.is_woken


def test_busy_workers_are_not_open_until_their_time_is_over() -> None:
    worker_set, workers = worker_set_of("a", "b", "c")

    worker_set.set_busy([workers["a"], workers["b"]], HALF, until=5.0)
    worker_set.expire_busy(HALF, now=4.9)
    assert (open_in(worker_set), busy_in(worker_set)) == ("c", "ab")
    worker_set.expire_busy(HALF, now=5.0)
    assert (open_in(worker_set), busy_in(worker_set)) == ("abc", "")


def test_the_time_of_the_first_busy_worker_counts_for_all() -> None:
    worker_set, workers = worker_set_of("a", "b")

    worker_set.set_busy([workers["a"]], HALF, until=5.0)
    worker_set.set_busy([workers["b"]], HALF, until=9.0)
    worker_set.expire_busy(HALF, now=5.0)

    assert open_in(worker_set) == "ab"


@pytest.mark.parametrize("thresholds", [None, Thresholds(active_decode_blocks=0.6)])
def test_busy_workers_are_open_again_under_other_thresholds(thresholds: Thresholds | None) -> None:
    worker_set, workers = worker_set_of("a")

    worker_set.set_busy([workers["a"]], HALF, until=5.0)
    worker_set.expire_busy(thresholds, now=0.0)

    assert open_in(worker_set) == "a"


def test_a_random_history_leaves_the_same_workers_as_plain_sets() -> None:
    rng, names = random.Random(3), [str(number) for number in range(10)]
    worker_set, workers = worker_set_of(*names)
    here, open_ones, busy = set(names), set(names), set[str]()

    for _ in range(2_000):
        name = rng.choice(names)
        match rng.choice(["leave out", "change", "remove", "add", "busy", "expire"]):
            case "leave out":
                worker_set.leave_out(workers[name])
                open_ones.discard(name)
                busy.discard(name)
            case "change":
                worker_set.on_change(workers[name])
                open_ones |= {name} & here
                busy.discard(name)
            case "remove" if name in here:
                worker_set.remove(workers[name])
                for each in (here, open_ones, busy):
                    each.discard(name)
            case "add" if name not in here:
                worker_set.add(workers[name])
                here.add(name)
                open_ones.add(name)
            case "busy" if name in open_ones:
                worker_set.set_busy([workers[name]], HALF, until=5.0)
                open_ones.remove(name)
                busy.add(name)
            case "expire" if rng.random() < 0.1:
                worker_set.expire_busy(HALF, now=5.0)
                open_ones, busy = open_ones | busy, set()
        assert (open_in(worker_set), busy_in(worker_set)) == ("".join(sorted(open_ones)), "".join(sorted(busy)))
        assert {one.key for one in worker_set} == here


# With real sessions


class Life:
    """Random events on one worker's session."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._worker = BareWorker(slots=2, places=1, config=WorkerSessionConfig(full_s=0.0))
        self._streams: list[Stream] = []
        self.worker_set = BareWorkers(self._worker).worker_set(CARD)
        self.candidate = self._worker.candidate

    @property
    def stream_count(self) -> int:
        return len(self._worker.session._streams)

    def step(self) -> None:
        events = [self._open, self._open, self._finish, self._refuse, self._hang_up, self._remember, self._report]
        self._rng.choice(events)()

    def _open(self) -> None:
        if len(self._streams) < 4:
            self._streams.append(self._worker.open())

    def _finish(self) -> None:
        if self._streams:
            self._worker.finish(self._streams[0].id)
            self._hang_up()

    def _refuse(self) -> None:
        if self._streams:
            self._worker.refuse(self._streams[0].id)
            assert isinstance(self._streams[0].ended.exception(), Failure)
            self._hang_up()

    def _hang_up(self) -> None:
        if self._streams:
            self._worker.session.close(self._streams.pop(0))

    def _remember(self) -> None:
        if self._rng.random() < 0.5:
            self.candidate.on_refused(RefusedFor.QUEUE_TOKENS, 1, self._rng.choice([0, 9]))
        else:
            self.candidate.on_refused(RefusedFor.CAPACITY, self._rng.choice([1, 3]), 0)

    def _report(self) -> None:
        self._worker.hear(load=Load(ranks=[RankLoad()] * self._rng.choice([0, 1])))


@pytest.mark.parametrize("seed", range(5))
def test_a_worker_with_room_is_always_open_after_a_random_history(seed: int) -> None:
    """A worker that was left out and does not report its change would never be asked again."""

    async def scenario() -> None:
        life, left_out_count = Life(seed), 0
        for number in range(3_000):
            if life.candidate.capacity.is_full() and life.candidate in life.worker_set.open:
                life.worker_set.leave_out(life.candidate)
                left_out_count += 1
            life.step()
            if number % 3 == 0:
                await asyncio.sleep(0)  # Refusals expire.
            assert life.candidate.capacity.is_full() or life.candidate in life.worker_set.open
            assert life.candidate.in_flight_count == life.stream_count
        assert left_out_count > 100

    run_async(scenario())
