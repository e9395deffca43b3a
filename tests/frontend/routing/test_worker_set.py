"""Roster: what was found without room is not looked at again before there is news of it, and nothing else is lost."""

import asyncio
import random

import pytest

from services.core.errors import Failure, RefusedFor
from services.frontend.routing.thresholds import Thresholds
from services.frontend.routing.worker_set import WorkerSet
from services.frontend.session.session import WorkerSessionConfig
from services.frontend.session.stream import Stream
from services.stubs.worker_pb2 import Load, RankLoad
from tests.frontend.support import BareWorker, BareWorkers
from tests.support.doubles import CARD, FakeWorker, run_async

HALF = Thresholds(active_decode_blocks=0.5)


def worker_set_of(*names: str) -> tuple[WorkerSet[FakeWorker], dict[str, FakeWorker]]:
    worker_set: WorkerSet[FakeWorker] = WorkerSet(CARD)
    workers = {name: FakeWorker(name) for name in names}
    for one in workers.values():
        worker_set.add(one)
    return worker_set, workers


def open_in(worker_set: WorkerSet[FakeWorker]) -> str:
    return "".join(sorted(one.key for one in worker_set.open))


def busy_in(worker_set: WorkerSet[FakeWorker]) -> str:
    return "".join(sorted(one.key for one in worker_set.busy))


def test_one_that_is_closed_is_there_but_not_open_until_there_is_news_of_it() -> None:
    worker_set, workers = worker_set_of("a", "b", "c")

    worker_set.close(workers["a"])
    assert (open_in(worker_set), len(worker_set)) == ("bc", 3)
    worker_set.on_news(workers["a"])
    assert open_in(worker_set) == "abc"


def test_both_may_be_said_again() -> None:
    worker_set, workers = worker_set_of("a", "b")

    for _ in range(2):
        worker_set.close(workers["a"])
    assert open_in(worker_set) == "b"
    for _ in range(2):
        worker_set.on_news(workers["a"])
    assert open_in(worker_set) == "ab"


def test_one_that_was_removed_does_not_come_back_by_news() -> None:
    worker_set, workers = worker_set_of("a", "b")

    worker_set.remove(workers["a"])
    worker_set.on_news(workers["a"])

    assert (open_in(worker_set), [one.key for one in worker_set]) == ("b", ["b"])


def test_news_call_whoever_waits() -> None:
    worker_set, workers = worker_set_of("a")

    with worker_set.line.place() as place:
        worker_set.on_news(workers["a"])
        assert place.is_called
        place.keep(is_room_left=False)
        worker_set.add(FakeWorker("b"))
        assert place.is_called


def test_those_believed_busy_are_not_open_until_that_is_doubted() -> None:
    worker_set, workers = worker_set_of("a", "b", "c")

    worker_set.believe_busy([workers["a"], workers["b"]], HALF, until=5.0)
    worker_set.doubt_busy(HALF, now=4.9)
    assert (open_in(worker_set), busy_in(worker_set)) == ("c", "ab")
    worker_set.doubt_busy(HALF, now=5.0)
    assert (open_in(worker_set), busy_in(worker_set)) == ("abc", "")


def test_the_first_found_busy_says_for_how_long_that_is_believed_of_all() -> None:
    worker_set, workers = worker_set_of("a", "b")

    worker_set.believe_busy([workers["a"]], HALF, until=5.0)
    worker_set.believe_busy([workers["b"]], HALF, until=9.0)
    worker_set.doubt_busy(HALF, now=5.0)

    assert open_in(worker_set) == "ab"


@pytest.mark.parametrize("thresholds", [None, Thresholds(active_decode_blocks=0.6)])
def test_other_thresholds_are_reason_to_doubt(thresholds: Thresholds | None) -> None:
    worker_set, workers = worker_set_of("a")

    worker_set.believe_busy([workers["a"]], HALF, until=5.0)
    worker_set.doubt_busy(thresholds, now=0.0)

    assert open_in(worker_set) == "a"


def test_holds_what_sets_would_after_any_history() -> None:
    rng, names = random.Random(3), [str(number) for number in range(10)]
    worker_set, workers = worker_set_of(*names)
    here, open_ones, busy = set(names), set(names), set[str]()

    for _ in range(2_000):
        name = rng.choice(names)
        match rng.choice(["close", "news", "remove", "add", "busy", "doubt"]):
            case "close":
                worker_set.close(workers[name])
                open_ones.discard(name)
                busy.discard(name)
            case "news":
                worker_set.on_news(workers[name])
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
                worker_set.believe_busy([workers[name]], HALF, until=5.0)
                open_ones.remove(name)
                busy.add(name)
            case "doubt" if rng.random() < 0.1:
                worker_set.doubt_busy(HALF, now=5.0)
                open_ones, busy = open_ones | busy, set()
        assert (open_in(worker_set), busy_in(worker_set)) == ("".join(sorted(open_ones)), "".join(sorted(busy)))
        assert {one.key for one in worker_set} == here


# With real sessions


class Life:
    """What may happen to a worker's session, at random."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._worker = BareWorker(slots=2, places=1, config=WorkerSessionConfig(full_s=0.0))
        self._streams: list[Stream] = []
        self.worker_set = BareWorkers(self._worker).worker_set(CARD)
        self.candidate = self._worker.candidate

    def go_on(self) -> None:
        events = [self._open, self._open, self._finish, self._refuse, self._hang_up, self._mark, self._report]
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

    def _mark(self) -> None:
        if self._rng.random() < 0.5:
            self.candidate.on_refused(RefusedFor.QUEUE_TOKENS, 1, self._rng.choice([0, 9]))
        else:
            self.candidate.on_refused(RefusedFor.CAPACITY, self._rng.choice([1, 3]), 0)

    def _report(self) -> None:
        self._worker.hear(load=Load(ranks=[RankLoad()] * self._rng.choice([0, 1])))


@pytest.mark.parametrize("seed", range(5))
def test_whatever_makes_room_on_a_worker_is_news_so_that_none_stays_closed(seed: int) -> None:
    """One that was closed and had no news would never be asked again."""

    async def scenario() -> None:
        life, closed_count = Life(seed), 0
        for number in range(3_000):
            if life.candidate.is_full() and life.candidate in life.worker_set.open:
                life.worker_set.close(life.candidate)
                closed_count += 1
            life.go_on()
            if number % 3 == 0:
                await asyncio.sleep(0)  # Marks lapse.
            assert life.candidate.is_full() or life.candidate in life.worker_set.open
        assert closed_count > 100

    run_async(scenario())
