"""Search: finds a worker wherever there is one, and looks at few of them."""

import random
from dataclasses import dataclass
from typing import Any

import pytest

from services.frontend.busy import AdmissionConfig, BusyThresholds
from services.frontend.eligible import LOOKS_MAX, Needs
from services.frontend.roster import Roster
from services.frontend.search import Search
from tests.support import CARD, FakeWorker, run_async


@dataclass
class Watched(FakeWorker):
    """Counts how often it is looked at."""

    looks: int = 0

    def is_full(self, count: int = 1, tokens: int = 0) -> bool:
        self.looks += 1
        return super().is_full(count, tokens)


class Many:
    """A search among so many workers, numbered from 0."""

    def __init__(self, number: int, **worker: Any) -> None:
        self.workers = [Watched(str(name), **worker) for name in range(number)]
        self.roster: Roster[FakeWorker] = Roster(CARD)
        for one in self.workers:
            self.roster.add(one)
        self._search: Search[FakeWorker] = Search(BusyThresholds(AdmissionConfig()), random.Random(5))

    def find(self, needs: Needs | None = None) -> str | None:
        async def find() -> FakeWorker | None:
            return self._search.find(self.roster, needs or Needs())

        found = run_async(find())
        return None if found is None else found.key

    def looks(self) -> int:
        """Since it was last asked."""
        looks = sum(one.looks for one in self.workers)
        for one in self.workers:
            one.looks = 0
        return looks


@pytest.mark.parametrize("number", [2, 10, 1000])
def test_looks_at_two_of_any_number(number: int) -> None:
    """It once sorted all of them for each request: 5 ms at 1,000 workers."""
    many = Many(number)

    assert many.find() is not None
    assert many.looks() == 2


@pytest.mark.parametrize("number", [1, 2, LOOKS_MAX, LOOKS_MAX + 1, 100])
def test_finds_the_only_one_that_has_room(number: int) -> None:
    many = Many(number, full=True)
    many.workers[-1].full = False

    assert {many.find() for _ in range(20)} == {str(number - 1)}


@pytest.mark.parametrize("number", [1, LOOKS_MAX, 100])
def test_a_quarantined_one_is_found_where_there_is_no_other(number: int) -> None:
    many = Many(number, full=True)
    many.workers[0].full, many.workers[0].quarantined_until = False, float("inf")

    assert many.find() == "0"


def test_those_that_are_full_are_looked_at_once_each_and_then_not_before_there_is_news_of_them() -> None:
    many = Many(100, full=True)

    assert many.find() is None
    many.looks()
    assert (many.find(), many.looks()) == (None, 0)
    many.workers[7].full = False
    many.roster.on_news(many.workers[7])
    assert many.find() == "7"


def test_one_that_has_room_for_fewer_stays_open_for_those() -> None:
    many = Many(3, request_limit=2)

    assert many.find(Needs(count=3)) is None
    assert many.find() is not None


def test_one_that_a_call_excludes_stays_open_for_others() -> None:
    many = Many(1)

    assert many.find(Needs(excluded=frozenset({"0"}))) is None
    assert many.find() == "0"


@pytest.mark.parametrize("gone", [{"is_draining": True}, {"is_lost": True}], ids=str)
def test_one_that_is_lost_or_leaves_is_not_found(gone: dict[str, bool]) -> None:
    assert Many(1, **gone).find() is None


def test_each_is_found_as_often_as_the_others() -> None:
    many = Many(20)

    found = [many.find() for _ in range(4_000)]

    counts = [found.count(str(number)) for number in range(20)]
    assert min(counts) > 120
    assert max(counts) < 280
