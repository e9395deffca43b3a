"""Roster: what was found without room is not looked at again before there is news of it, and nothing else is lost."""

import asyncio
import random

import pytest

from services.core.errors import Failure
from services.frontend.routing.thresholds import Thresholds
from services.frontend.routing.worker_set import Roster
from services.frontend.session.session import SessionConfig
from services.frontend.session.stream import Stream
from services.stubs.worker_pb2 import Load, RankLoad
from tests.frontend.support import BareWorker, BareWorkers
from tests.support.doubles import CARD, FakeWorker, run_async

HALF = Thresholds(active_decode_blocks=0.5)


def roster_of(*names: str) -> tuple[Roster[FakeWorker], dict[str, FakeWorker]]:
    roster: Roster[FakeWorker] = Roster(CARD)
    workers = {name: FakeWorker(name) for name in names}
    for one in workers.values():
        roster.add(one)
    return roster, workers


def open_in(roster: Roster[FakeWorker]) -> str:
    return "".join(sorted(one.key for one in roster.open))


def busy_in(roster: Roster[FakeWorker]) -> str:
    return "".join(sorted(one.key for one in roster.busy))


def test_one_that_is_closed_is_there_but_not_open_until_there_is_news_of_it() -> None:
    roster, workers = roster_of("a", "b", "c")

    roster.close(workers["a"])
    assert (open_in(roster), len(roster)) == ("bc", 3)
    roster.on_news(workers["a"])
    assert open_in(roster) == "abc"


def test_both_may_be_said_again() -> None:
    roster, workers = roster_of("a", "b")

    for _ in range(2):
        roster.close(workers["a"])
    assert open_in(roster) == "b"
    for _ in range(2):
        roster.on_news(workers["a"])
    assert open_in(roster) == "ab"


def test_one_that_was_removed_does_not_come_back_by_news() -> None:
    roster, workers = roster_of("a", "b")

    roster.remove(workers["a"])
    roster.on_news(workers["a"])

    assert (open_in(roster), [one.key for one in roster]) == ("b", ["b"])


def test_news_call_whoever_waits() -> None:
    roster, workers = roster_of("a")

    with roster.line.place() as place:
        roster.on_news(workers["a"])
        assert place.is_called
        place.keep(is_room_left=False)
        roster.add(FakeWorker("b"))
        assert place.is_called


def test_those_believed_busy_are_not_open_until_that_is_doubted() -> None:
    roster, workers = roster_of("a", "b", "c")

    roster.believe_busy([workers["a"], workers["b"]], HALF, until=5.0)
    roster.doubt_busy(HALF, now=4.9)
    assert (open_in(roster), busy_in(roster)) == ("c", "ab")
    roster.doubt_busy(HALF, now=5.0)
    assert (open_in(roster), busy_in(roster)) == ("abc", "")


def test_the_first_found_busy_says_for_how_long_that_is_believed_of_all() -> None:
    roster, workers = roster_of("a", "b")

    roster.believe_busy([workers["a"]], HALF, until=5.0)
    roster.believe_busy([workers["b"]], HALF, until=9.0)
    roster.doubt_busy(HALF, now=5.0)

    assert open_in(roster) == "ab"


@pytest.mark.parametrize("thresholds", [None, Thresholds(active_decode_blocks=0.6)])
def test_other_thresholds_are_reason_to_doubt(thresholds: Thresholds | None) -> None:
    roster, workers = roster_of("a")

    roster.believe_busy([workers["a"]], HALF, until=5.0)
    roster.doubt_busy(thresholds, now=0.0)

    assert open_in(roster) == "a"


def test_holds_what_sets_would_after_any_history() -> None:
    rng, names = random.Random(3), [str(number) for number in range(10)]
    roster, workers = roster_of(*names)
    here, open_ones, busy = set(names), set(names), set[str]()

    for _ in range(2_000):
        name = rng.choice(names)
        match rng.choice(["close", "news", "remove", "add", "busy", "doubt"]):
            case "close":
                roster.close(workers[name])
                open_ones.discard(name)
                busy.discard(name)
            case "news":
                roster.on_news(workers[name])
                open_ones |= {name} & here
                busy.discard(name)
            case "remove" if name in here:
                roster.remove(workers[name])
                for each in (here, open_ones, busy):
                    each.discard(name)
            case "add" if name not in here:
                roster.add(workers[name])
                here.add(name)
                open_ones.add(name)
            case "busy" if name in open_ones:
                roster.believe_busy([workers[name]], HALF, until=5.0)
                open_ones.remove(name)
                busy.add(name)
            case "doubt" if rng.random() < 0.1:
                roster.doubt_busy(HALF, now=5.0)
                open_ones, busy = open_ones | busy, set()
        assert (open_in(roster), busy_in(roster)) == ("".join(sorted(open_ones)), "".join(sorted(busy)))
        assert {one.key for one in roster} == here


# With real sessions


class Life:
    """What may happen to a worker's session, at random."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._worker = BareWorker(slots=2, places=1, config=SessionConfig(full_s=0.0))
        self._streams: list[Stream] = []
        self.roster = BareWorkers(self._worker).roster(CARD)
        self.session = self._worker.session

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
            self.session.close(self._streams.pop(0))

    def _mark(self) -> None:
        if self._rng.random() < 0.5:
            self.session.mark_long(self._rng.choice([0, 9]))
        else:
            self.session.mark_full(self._rng.choice([1, 3]))

    def _report(self) -> None:
        self._worker.hear(load=Load(ranks=[RankLoad()] * self._rng.choice([0, 1])))


@pytest.mark.parametrize("seed", range(5))
def test_whatever_makes_room_on_a_worker_is_news_so_that_none_stays_closed(seed: int) -> None:
    """One that was closed and had no news would never be asked again."""

    async def scenario() -> None:
        life, closed_count = Life(seed), 0
        for number in range(3_000):
            if life.session.is_full() and life.session in life.roster.open:
                life.roster.close(life.session)
                closed_count += 1
            life.go_on()
            if number % 3 == 0:
                await asyncio.sleep(0)  # Marks lapse.
            assert life.session.is_full() or life.session in life.roster.open
        assert closed_count > 100

    run_async(scenario())
