"""Rejections: why no worker takes a request, how full the workers are, and when to try again."""

import random

import pytest

from services.core.errors import Failure, Reason, jittered_s
from services.frontend.routing.candidate import Candidate
from services.frontend.routing.load import Occupancy
from services.frontend.routing.policy import survey
from services.frontend.routing.rejection import Rejections, limits_and_load, rejection_of, retry_after_s
from services.frontend.routing.state import Needs
from services.frontend.routing.thresholds import Thresholds
from services.worker.engine import RankLoad
from tests.support.doubles import make_candidate

BUSY = RankLoad(kv_blocks_used=9, kv_blocks_total=10, active_prefill_tokens=0)
HALF = Thresholds(active_decode_blocks=0.5)


def bounds(*workers: Occupancy) -> tuple[float, float]:
    """The least and the most of many draws."""
    rng = random.Random(7)
    draws = [jittered_s(retry_after_s(workers), rng) for _ in range(2_000)]
    return round(min(draws), 1), round(max(draws), 1)


def test_retry_after_is_the_wait_for_a_slot_give_or_take_a_fifth() -> None:
    assert bounds(Occupancy(slots=4, waiting=7, service_s=5.0)) == (8.0, 12.0)


def test_retry_after_is_that_of_the_worker_with_the_shortest_wait() -> None:
    slow, soon = Occupancy(slots=1, waiting=9, service_s=5.0), Occupancy(slots=2, waiting=3, service_s=5.0)

    assert bounds(slow, soon) == (8.0, 12.0)


@pytest.mark.parametrize(
    "workers", [(), (Occupancy(slots=2, waiting=5),), (Occupancy(waiting=5, service_s=9.0),)], ids=str
)
def test_retry_after_is_one_to_one_and_a_half_seconds_if_no_wait_is_known(workers: tuple[Occupancy, ...]) -> None:
    assert bounds(*workers) == (1.0, 1.5)


def test_retry_after_ignores_workers_whose_wait_is_unknown() -> None:
    assert bounds(Occupancy(), Occupancy(slots=1, waiting=1, service_s=5.0)) == (8.0, 12.0)


@pytest.mark.parametrize(("service_s", "expected"), [(0.001, (1.0, 1.5)), (10_000.0, (40.0, 60.0))])
def test_retry_after_is_between_a_second_and_a_minute(service_s: float, expected: tuple[float, float]) -> None:
    assert bounds(Occupancy(slots=1, service_s=service_s)) == expected


@pytest.mark.parametrize("seconds", [0.0, 1.0, 10.0, 60.0, 1e9])
def test_requests_rejected_together_get_different_times_to_try_again(seconds: float) -> None:
    rng = random.Random(1)

    assert len({jittered_s(seconds, rng) for _ in range(50)}) == 50


def test_limits_and_load_are_summed_over_all_workers() -> None:
    workers = [Occupancy(slots=4, places=2, running=4, waiting=1), Occupancy(slots=8, places=0, running=3)]

    assert limits_and_load(workers) == {
        "engine_request_limit": "12",
        "request_queue_limit": "2",
        "running": "7",
        "waiting": "1",
    }


# Which rejection


def rejected(*workers: Candidate, count: int = 1, registered_count: int = 0) -> Failure:
    return rejection_of(survey(workers, Needs(thresholds=HALF, count=count), 0.0), "m", registered_count)


def busy(key: str) -> Candidate:
    return make_candidate(key, ranks=[BUSY, BUSY])


@pytest.mark.parametrize(
    ("workers", "count", "reason"),
    [
        ([], 1, Reason.NO_WORKERS),
        ([make_candidate("a", is_draining=True)], 1, Reason.NO_WORKERS),
        ([make_candidate("a", is_full=True)], 1, Reason.OVERLOADED),
        ([busy("a")], 1, Reason.OVERLOADED),
        ([busy("a"), make_candidate("b", is_full=True)], 1, Reason.OVERLOADED),
        ([make_candidate("a", slots=4, in_flight_count=2)], 3, Reason.OVERLOADED),
        ([make_candidate("a", slots=4), make_candidate("b", slots=2)], 5, Reason.INVALID_ARGUMENT),
        ([make_candidate("a", slots=2), make_candidate("b", is_full=True)], 3, Reason.OVERLOADED),
        ([make_candidate("a", slots=2, is_draining=True)], 3, Reason.NO_WORKERS),
    ],
)
def test_the_reason_tells_why_no_worker_is_eligible(workers: list[Candidate], count: int, reason: Reason) -> None:
    assert rejected(*workers, count=count).reason is reason


BLOCKS = "active_decode_blocks 0.9 (9 of 10), above the threshold of 0.5"


@pytest.mark.parametrize(
    ("workers", "detail"),
    [
        ([busy("a"), busy("b")], f"every worker of 'm' is over a busy threshold; the least loaded has {BLOCKS}"),
        (
            [busy("a"), make_candidate("b", is_full=True)],
            f"some workers of 'm' are at capacity and all others over a busy threshold; the least loaded has {BLOCKS}",
        ),
    ],
    ids=["all busy", "some full"],
)
def test_a_rejection_by_busy_workers_names_the_thresholds_and_how_far_they_are_exceeded(
    workers: list[Candidate], detail: str
) -> None:
    """Even if some workers are full, because higher thresholds would have let the request in."""
    failure = rejected(*workers)

    assert failure.detail == detail
    assert (failure.metadata["cause"], failure.metadata["active_decode_blocks_threshold"]) == ("busy_threshold", "0.5")
    assert "active_prefill_tokens_threshold" not in failure.metadata


@pytest.mark.parametrize("reported", [(), (BUSY,)], ids=["calm", "busy too"])
def test_a_rejection_by_full_workers_names_capacity_alone(reported: tuple[RankLoad, ...]) -> None:
    failure = rejected(make_candidate("a", is_full=True, ranks=reported))

    assert failure.detail == "every worker of 'm' is at capacity"
    assert failure.metadata["cause"] == "capacity"
    assert "active_decode_blocks_threshold" not in failure.metadata


def test_a_rejection_of_too_many_choices_names_the_most_that_a_worker_takes() -> None:
    workers = make_candidate("a", slots=4), make_candidate("b", slots=2)

    failure = rejected(*workers, count=5)

    assert failure.param == "n"
    assert "more than 4 requests" in failure.detail


def test_too_many_choices_for_the_connected_workers_are_not_refused_for_good_while_others_may_come() -> None:
    workers = make_candidate("a", slots=4), make_candidate("b", slots=2)

    failure = rejected(*workers, count=5, registered_count=3)

    assert failure.reason is Reason.NO_WORKERS
    assert "(registered: 3)" in failure.detail


def test_a_rejection_without_workers_has_a_jittered_time_to_try_again() -> None:
    rejections = Rejections(random.Random(1))

    failures = [rejections.not_replaced("m") for _ in range(50)]

    assert {failure.reason for failure in failures} == {Reason.NO_WORKERS}
    times = [failure.retry_after_s or 0.0 for failure in failures]
    assert len(set(times)) == 50
    assert 1 <= min(times) <= max(times) <= 1.5
