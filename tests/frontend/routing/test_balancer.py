"""Search: finds a worker wherever there is one, and looks at few of them."""

import random
from dataclasses import dataclass
from typing import Any

import pytest
from msgspec.structs import replace

from services.core.errors import Failure, Reason
from services.frontend.routing import balancer as balancer_module
from services.frontend.routing.balancer import Balancer
from services.frontend.routing.load import Occupancy
from services.frontend.routing.policy import LOOKS_MAX, Needs
from services.frontend.routing.thresholds import AdmissionConfig, BusyThresholds, Thresholds
from services.frontend.routing.worker_set import WorkerSet
from services.worker.engine import RankLoad
from tests.support.doubles import CARD, FakeWorker, run_async

BUSY = RankLoad(kv_blocks_used=9, kv_blocks_total=10, active_prefill_tokens=0)
BY_HALF = Needs(thresholds=Thresholds(active_decode_blocks=0.5))
BY_MORE = Needs(thresholds=Thresholds(active_decode_blocks=0.95))


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
        self.worker_set: WorkerSet[FakeWorker] = WorkerSet(CARD)
        for one in self.workers:
            self.worker_set.add(one)
        self._search: Balancer[FakeWorker] = Balancer(BusyThresholds(AdmissionConfig()), random.Random(5))

    def find(self, needs: Needs | None = None, *, is_under_way: bool = False) -> str | None:
        async def find() -> FakeWorker | None:
            return self._search.find(self.worker_set, needs or Needs(), is_under_way=is_under_way)

        found = run_async(find())
        return None if found is None else found.key

    def refusal(self, needs: Needs = BY_HALF) -> Failure:
        async def refuse() -> Failure:
            return self._search.refusal(self.worker_set, needs, "m")

        return run_async(refuse())

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
    many.worker_set.on_news(many.workers[7])
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


# Many that are busy

MANY = 100


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is believed is believed to the end of the test."""
    set_times(monkeypatch, 60.0)


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch, _patient: None) -> None:
    """Nothing is believed for any time."""
    set_times(monkeypatch, 0.0)


def set_times(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    for name in ("BUSY_S", "TOLD_S"):
        monkeypatch.setattr(balancer_module, name, seconds)


def test_many_that_are_busy_are_looked_at_once_each_for_a_while() -> None:
    many = Many(MANY, reported=[BUSY])

    assert many.find(BY_HALF) is None
    many.looks()
    assert (many.find(BY_HALF), many.looks()) == (None, 0)


@pytest.mark.usefixtures("forgetful")
def test_and_are_found_when_that_has_passed() -> None:
    many = Many(MANY, reported=[BUSY])
    assert many.find(BY_HALF) is None

    many.workers[3].reported = ()

    assert many.find(BY_HALF) == "3"


def test_a_few_are_looked_at_each_time() -> None:
    many = Many(LOOKS_MAX, reported=[BUSY])
    assert many.find(BY_HALF) is None

    many.workers[3].reported = ()

    assert many.find(BY_HALF) == "3"


@pytest.mark.parametrize("needs", [BY_MORE, Needs()], ids=["higher", "none"])
def test_other_thresholds_count_at_once(needs: Needs) -> None:
    many = Many(MANY, reported=[BUSY])
    assert many.find(BY_HALF) is None

    assert many.find(needs) is not None
    assert many.find(BY_HALF) is None


def test_a_request_under_way_goes_to_one_that_is_believed_to_be_busy_but_not_to_one_without_room() -> None:
    many = Many(MANY, reported=[BUSY])
    assert many.find(BY_HALF) is None

    assert many.find(BY_HALF, is_under_way=True) is not None
    for one in many.workers[1:]:
        one.full = True
    assert many.find(BY_HALF, is_under_way=True) == "0"
    many.workers[0].full = True
    assert many.find(BY_HALF, is_under_way=True) is None
    assert (list(many.worker_set.open), list(many.worker_set.busy)) == ([], [])


def test_news_of_one_that_is_believed_to_be_busy_open_it() -> None:
    many = Many(MANY, reported=[BUSY])
    assert many.find(BY_HALF) is None
    many.workers[3].reported = ()

    many.worker_set.on_news(many.workers[3])

    assert many.find(BY_HALF) == "3"


# What a refusal tells


def test_what_is_told_of_many_is_told_again_for_a_while_but_each_has_a_time_of_its_own_to_come_back() -> None:
    many = Many(MANY, full=True, occupancy=Occupancy(slots=4, running=4, service_s=20.0))
    first = many.refusal()
    many.looks()

    second = many.refusal()

    assert many.looks() == 0
    assert (first.reason, first.metadata) == (second.reason, second.metadata)
    assert first.metadata["running"] == "400"
    assert first.retry_after_s != second.retry_after_s


def test_wherever_a_request_was_refused_before_it_is_told_the_same_of_many() -> None:
    """Each once had all of them sorted for itself, when all are full and most have refused somebody."""
    many = Many(MANY, full=True)
    many.refusal()
    many.looks()

    for number in range(MANY):
        assert many.refusal(replace(BY_HALF, excluded=frozenset({str(number)}))).reason is Reason.OVERLOADED

    assert many.looks() == 0


@pytest.mark.usefixtures("forgetful")
def test_and_anew_when_that_has_passed() -> None:
    many = Many(MANY, full=True, occupancy=Occupancy(slots=4, running=4))
    assert many.refusal().metadata["running"] == "400"

    many.workers[0].occupancy = Occupancy(slots=4, running=3)

    assert many.refusal().metadata["running"] == "399"


def test_or_when_a_worker_has_come_or_gone() -> None:
    many = Many(MANY, is_draining=True)
    assert many.refusal().reason is Reason.NO_WORKERS

    many.worker_set.add(new := FakeWorker("new", full=True))
    assert many.refusal().reason is Reason.OVERLOADED
    many.worker_set.remove(new)
    assert many.refusal().reason is Reason.NO_WORKERS


def test_of_a_few_it_is_told_as_it_is() -> None:
    many = Many(LOOKS_MAX, full=True, occupancy=Occupancy(slots=4, running=4))
    assert many.refusal().metadata["running"] == "32"

    many.workers[0].occupancy = Occupancy(slots=4, running=3)

    assert many.refusal().metadata["running"] == "31"


def test_remembers_what_it_has_told_for_few_kinds_of_requests() -> None:
    many = Many(MANY, full=True)

    async def refuse() -> None:
        for number in range(3 * balancer_module.TOLD_MAX):
            many._search.refusal(many.worker_set, Needs(count=number + 1), "m")

    run_async(refuse())

    assert len(many._search._told) <= balancer_module.TOLD_MAX
