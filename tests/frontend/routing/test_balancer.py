"""Balancer: finds a worker if there is one, looks at few of many, and says why there is none."""

import random
from typing import Any

import pytest
from msgspec.structs import replace

from services.core.errors import Failure, Reason
from services.frontend.routing import balancer as balancer_module
from services.frontend.routing.balancer import Balancer
from services.frontend.routing.candidate import Candidate
from services.frontend.routing.policy import LOOKS_MAX
from services.frontend.routing.state import Needs, State
from services.frontend.routing.thresholds import AdmissionConfig, BusyThresholds, Thresholds
from services.frontend.routing.worker_set import WorkerSet
from services.rpc.codec import seconds_to_wire
from services.stubs.worker_pb2 import Load
from services.worker.engine import RankLoad
from tests.support.doubles import CARD, fill, make_candidate, make_room, report

CALM = RankLoad(kv_blocks_used=0, kv_blocks_total=10, active_prefill_tokens=0)
BUSY = RankLoad(kv_blocks_used=9, kv_blocks_total=10, active_prefill_tokens=0)
BY_HALF = Needs(thresholds=Thresholds(active_decode_blocks=0.5))
BY_MORE = Needs(thresholds=Thresholds(active_decode_blocks=0.95))


class Watched(Candidate):
    """Counts how often its state is looked at."""

    looks = 0

    def state(self, needs: Needs, now: float) -> State:
        self.looks += 1
        return super().state(needs, now)


class Many:
    """A balancer over `number` workers, named from 0 on."""

    def __init__(self, number: int, **worker: Any) -> None:
        self.workers = [make_candidate(str(name), kind=Watched, **worker) for name in range(number)]
        self.worker_set = WorkerSet(CARD)
        for one in self.workers:
            self.worker_set.add(one)
        self.balancer = Balancer(BusyThresholds(AdmissionConfig()), random.Random(5))

    def choose(self, needs: Needs | None = None) -> str | None:
        """The worker for a new request; None if it is rejected."""
        try:
            return self.balancer.choose(self.worker_set, needs or Needs()).key
        except Failure:
            return None

    def choose_other(self, needs: Needs) -> str | None:
        """The worker for a request that lost its own."""
        found = self.balancer.choose_other(self.worker_set, needs)
        return None if found is None else found.key

    def rejection(self, needs: Needs = BY_HALF) -> Failure:
        with pytest.raises(Failure) as caught:
            self.balancer.choose(self.worker_set, needs)
        return caught.value

    def looks(self) -> int:
        """How often workers were looked at since the last call."""
        watched = [one for one in self.workers if isinstance(one, Watched)]
        looks = sum(one.looks for one in watched)
        for one in watched:
            one.looks = 0
        return looks


@pytest.mark.parametrize("number", [2, 10, 1000])
def test_two_workers_are_looked_at_however_many_there_are(number: int) -> None:
    """A bug: each request looked at all workers, which took 5 ms at 1,000 workers."""
    many = Many(number)

    assert many.choose() is not None
    assert many.looks() == 2


@pytest.mark.parametrize("number", [1, 2, LOOKS_MAX, LOOKS_MAX + 1, 100])
def test_the_only_worker_with_room_is_found(number: int) -> None:
    many = Many(number, is_full=True)
    make_room(many.workers[-1])

    assert {many.choose() for _ in range(20)} == {str(number - 1)}


@pytest.mark.parametrize("number", [1, LOOKS_MAX, 100])
def test_a_quarantined_worker_is_found_if_there_is_no_other(number: int) -> None:
    many = Many(number, is_full=True)
    make_room(many.workers[0])
    many.workers[0].quarantined_until = float("inf")

    assert many.choose() == "0"


def test_a_full_worker_is_looked_at_once_and_again_only_after_a_change() -> None:
    many = Many(100, is_full=True)

    assert many.choose() is None
    many.looks()
    assert (many.choose(), many.looks()) == (None, 0)
    make_room(many.workers[7])
    many.worker_set.on_change(many.workers[7])
    assert many.choose() == "7"


def test_a_worker_without_room_for_three_choices_stays_open_for_one() -> None:
    many = Many(3, slots=2)

    assert many.choose(Needs(count=3)) is None
    assert many.choose() is not None


def test_a_worker_that_a_call_excludes_stays_open_for_others() -> None:
    many = Many(1)

    assert many.choose(Needs(excluded=frozenset({"0"}))) is None
    assert many.choose() == "0"


@pytest.mark.parametrize("gone", [{"is_draining": True}, {"is_lost": True}], ids=str)
def test_a_worker_that_is_lost_or_leaves_is_not_found(gone: dict[str, bool]) -> None:
    assert Many(1, **gone).choose() is None


def test_equal_workers_are_chosen_equally_often() -> None:
    many = Many(20)

    found = [many.choose() for _ in range(4_000)]

    counts = [found.count(str(number)) for number in range(20)]
    assert min(counts) > 120
    assert max(counts) < 280


# Many busy workers

MANY = 100


@pytest.fixture(autouse=True)
def _long_reuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier looks count to the end of the test."""
    set_times(monkeypatch, 60.0)


@pytest.fixture
def no_reuse(monkeypatch: pytest.MonkeyPatch, _long_reuse: None) -> None:
    """Earlier looks never count."""
    set_times(monkeypatch, 0.0)


def set_times(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    for name in ("BUSY_S", "REJECTION_S"):
        monkeypatch.setattr(balancer_module, name, seconds)


def test_each_of_many_busy_workers_is_looked_at_once_for_a_while() -> None:
    many = Many(MANY, ranks=[BUSY])

    assert many.choose(BY_HALF) is None
    many.looks()
    assert (many.choose(BY_HALF), many.looks()) == (None, 0)


@pytest.mark.usefixtures("no_reuse")
def test_a_worker_that_was_busy_is_found_after_a_while() -> None:
    many = Many(MANY, ranks=[BUSY])
    assert many.choose(BY_HALF) is None

    report(many.workers[3], CALM)

    assert many.choose(BY_HALF) == "3"


def test_a_few_busy_workers_are_looked_at_by_each_request() -> None:
    many = Many(LOOKS_MAX, ranks=[BUSY])
    assert many.choose(BY_HALF) is None

    report(many.workers[3], CALM)

    assert many.choose(BY_HALF) == "3"


@pytest.mark.parametrize("needs", [BY_MORE, Needs()], ids=["higher", "none"])
def test_changed_thresholds_count_for_the_next_request(needs: Needs) -> None:
    many = Many(MANY, ranks=[BUSY])
    assert many.choose(BY_HALF) is None

    assert many.choose(needs) is not None
    assert many.choose(BY_HALF) is None


def test_a_moved_request_goes_to_a_busy_worker_but_not_to_a_full_one() -> None:
    many = Many(MANY, ranks=[BUSY])
    assert many.choose(BY_HALF) is None

    assert many.choose_other(BY_HALF) is not None
    for one in many.workers[1:]:
        fill(one)
    assert many.choose_other(BY_HALF) == "0"
    fill(many.workers[0])
    assert many.choose_other(BY_HALF) is None
    assert (list(many.worker_set.open), list(many.worker_set.busy)) == ([], [])


def test_a_change_opens_a_busy_worker() -> None:
    many = Many(MANY, ranks=[BUSY])
    assert many.choose(BY_HALF) is None
    report(many.workers[3], CALM)

    many.worker_set.on_change(many.workers[3])

    assert many.choose(BY_HALF) == "3"


# Rejections


@pytest.mark.parametrize("number", [1, LOOKS_MAX, MANY])
def test_a_rejection_is_reused_for_a_while_with_a_retry_after_of_its_own(number: int) -> None:
    many = Many(number, is_full=True, slots=4, load=Load(running=4, service_time=seconds_to_wire(20.0)))
    first = many.rejection()
    many.looks()

    second = many.rejection()

    assert many.looks() == 0
    assert (first.reason, first.metadata) == (second.reason, second.metadata)
    assert first.metadata["running"] == str(4 * number)
    assert first.retry_after_s != second.retry_after_s


def test_requests_that_different_workers_refused_share_a_rejection() -> None:
    """A bug: when all were full and most had refused a request, each request looked at all workers."""
    many = Many(MANY, is_full=True)
    many.rejection()
    many.looks()

    for number in range(MANY):
        assert many.rejection(replace(BY_HALF, excluded=frozenset({str(number)}))).reason is Reason.OVERLOADED

    assert many.looks() == 0


@pytest.mark.usefixtures("no_reuse")
@pytest.mark.parametrize("number", [1, MANY])
def test_a_rejection_is_built_anew_after_a_while(number: int) -> None:
    many = Many(number, is_full=True, slots=4, load=Load(running=4))
    assert many.rejection().metadata["running"] == str(4 * number)

    many.workers[0].load.add(Load(running=3))

    assert many.rejection().metadata["running"] == str(4 * number - 1)


@pytest.mark.parametrize("number", [1, MANY])
def test_a_worker_that_has_room_again_is_found_while_a_rejection_is_kept(number: int) -> None:
    many = Many(number, is_full=True)
    assert many.choose() is None

    make_room(many.workers[0])
    many.worker_set.on_change(many.workers[0])

    many.balancer.require_room(many.worker_set, Needs())
    assert many.choose() == "0"


def test_a_rejection_is_built_anew_when_a_worker_has_come_or_gone() -> None:
    many = Many(MANY, is_draining=True)
    assert many.rejection().reason is Reason.NO_WORKERS

    many.worker_set.add(new := make_candidate("new", is_full=True))
    assert many.rejection().reason is Reason.OVERLOADED
    many.worker_set.remove(new)
    assert many.rejection().reason is Reason.NO_WORKERS


def test_a_few_workers_that_a_request_must_not_go_to_reject_no_other_one_in_its_words() -> None:
    many = Many(1)
    assert many.rejection(Needs(excluded=frozenset({"0"}))).reason is Reason.NO_WORKERS
    fill(many.workers[0])

    assert many.rejection(Needs()).reason is Reason.OVERLOADED


def test_the_number_of_rejections_kept_is_bounded() -> None:
    many = Many(MANY, is_full=True)

    for number in range(3 * balancer_module.REJECTIONS_MAX):
        many.rejection(Needs(count=number + 1))

    assert len(many.balancer._kept) <= balancer_module.REJECTIONS_MAX


@pytest.mark.parametrize("number", [LOOKS_MAX, MANY])
@pytest.mark.parametrize(
    "worker", [{}, {"is_full": True}, {"ranks": [BUSY]}, {"quarantined_until": float("inf")}], ids=str
)
def test_admission_rejects_exactly_the_requests_that_routing_would_reject(number: int, worker: dict[str, Any]) -> None:
    many, same = Many(number, **worker), Many(number, **worker)
    is_rejected = many.choose(BY_HALF) is None

    if is_rejected:
        with pytest.raises(Failure):
            same.balancer.require_room(same.worker_set, BY_HALF)
    else:
        same.balancer.require_room(same.worker_set, BY_HALF)
