"""Which workers a call may go to, and what it is told where there is none."""

import random
from collections.abc import Sequence

import pytest

from services.core.errors import Reason
from services.frontend.routing.policy import Needs, View, choose, view
from services.frontend.routing.rejection import refusal
from services.frontend.routing.thresholds import Thresholds
from services.worker.engine import RankLoad
from tests.support.doubles import FakeWorker

BUSY = RankLoad(kv_blocks_used=9, kv_blocks_total=10, active_prefill_tokens=0)
CALM = RankLoad(kv_blocks_used=1, kv_blocks_total=10, active_prefill_tokens=0)
HALF = Thresholds(active_decode_blocks=0.5)


def seen(*workers: FakeWorker, excluded: str = "", count: int = 1) -> View[FakeWorker]:
    return view(workers, Needs(frozenset(excluded), HALF, count), 0.0)


def keys(*workers: FakeWorker, is_under_way: bool = False, excluded: str = "") -> list[str]:
    return [one.key for one in seen(*workers, excluded=excluded).eligible(is_under_way=is_under_way)]


def busy(key: str) -> FakeWorker:
    return FakeWorker(key, reported=[BUSY, BUSY])


def chosen(workers: Sequence[FakeWorker], rng: random.Random) -> str:
    worker = choose(workers, rng)
    assert worker is not None
    return worker.key


def test_choice_among_many_is_never_the_most_loaded() -> None:
    workers = [FakeWorker(str(load), in_flight_count=load) for load in range(5)]
    rng = random.Random(7)

    assert "4" not in {chosen(workers, rng) for _ in range(200)}


def test_of_two_with_as_many_requests_the_one_whose_load_is_known_is_chosen() -> None:
    unknown, known = FakeWorker("unknown"), FakeWorker("known", reported=[CALM])
    rng = random.Random(7)

    assert {chosen([unknown, known], rng) for _ in range(50)} == {"known"}
    unknown.in_flight_count, known.in_flight_count = 0, 1
    assert {chosen([unknown, known], rng) for _ in range(50)} == {"unknown"}


def test_a_busy_worker_is_passed_by_even_for_one_in_quarantine() -> None:
    assert keys(busy("a"), FakeWorker("b", quarantined_until=1.0)) == ["b"]


def test_a_worker_with_a_rank_that_is_not_busy_or_with_none_that_is_known_is_not_busy() -> None:
    assert keys(FakeWorker("a", reported=[BUSY, CALM]), FakeWorker("b")) == ["a", "b"]


def test_without_thresholds_nobody_is_busy() -> None:
    assert [one.key for one in view([busy("a")], Needs(), 0.0).healthy] == ["a"]


def test_busy_workers_are_for_requests_under_way_and_only_where_there_is_no_other() -> None:
    assert keys(busy("a")) == []
    assert keys(busy("a"), is_under_way=True) == ["a"]
    assert keys(busy("a"), FakeWorker("b"), is_under_way=True) == ["b"]
    assert keys(busy("a"), is_under_way=True, excluded="a") == []


def test_several_choices_go_only_where_there_is_room_for_all() -> None:
    workers = FakeWorker("a", request_limit=4, in_flight_count=2), FakeWorker("b", request_limit=8, in_flight_count=5)

    assert [one.key for one in seen(*workers, count=2).healthy] == ["a", "b"]
    assert [one.key for one in seen(*workers, count=3).healthy] == ["b"]
    assert seen(*workers, count=4).healthy == []


@pytest.mark.parametrize(
    ("workers", "count", "reason"),
    [
        ([], 1, Reason.NO_WORKERS),
        ([FakeWorker("a", is_draining=True)], 1, Reason.NO_WORKERS),
        ([FakeWorker("a", full=True)], 1, Reason.OVERLOADED),
        ([busy("a")], 1, Reason.OVERLOADED),
        ([busy("a"), FakeWorker("b", full=True)], 1, Reason.OVERLOADED),
        ([FakeWorker("a", request_limit=4, in_flight_count=2)], 3, Reason.OVERLOADED),
        ([FakeWorker("a", request_limit=4), FakeWorker("b", request_limit=2)], 5, Reason.INVALID_ARGUMENT),
        ([FakeWorker("a", request_limit=2), FakeWorker("b", full=True)], 3, Reason.OVERLOADED),
        ([FakeWorker("a", request_limit=2, is_draining=True)], 3, Reason.NO_WORKERS),
    ],
)
def test_says_why_there_is_none(workers: list[FakeWorker], count: int, reason: Reason) -> None:
    assert refusal(seen(*workers, count=count), "m").reason is reason


BLOCKS = "active_decode_blocks 0.9 (9 of 10) of at most 0.5"


@pytest.mark.parametrize(
    ("workers", "detail"),
    [
        ([busy("a"), busy("b")], f"every worker of 'm' is over a busy threshold, the least loaded with {BLOCKS}"),
        (
            [busy("a"), FakeWorker("b", full=True)],
            f"some workers of 'm' are at capacity and all others over a busy threshold, the least loaded with {BLOCKS}",
        ),
    ],
    ids=["all busy", "some full"],
)
def test_a_refusal_for_thresholds_tells_them_and_how_far_they_are_exceeded(
    workers: list[FakeWorker], detail: str
) -> None:
    """Also where some workers are full: higher ones would have let the request in."""
    failure = refusal(seen(*workers), "m")

    assert failure.detail == detail
    assert (failure.metadata["cause"], failure.metadata["active_decode_blocks_threshold"]) == ("busy_threshold", "0.5")
    assert "active_prefill_tokens_threshold" not in failure.metadata


@pytest.mark.parametrize("reported", [(), (BUSY,)], ids=["calm", "busy too"])
def test_a_refusal_by_full_workers_is_for_capacity_alone(reported: tuple[RankLoad, ...]) -> None:
    failure = refusal(seen(FakeWorker("a", full=True, reported=reported)), "m")

    assert failure.detail == "every worker of 'm' is at capacity"
    assert failure.metadata["cause"] == "capacity"
    assert "active_decode_blocks_threshold" not in failure.metadata


def test_names_the_most_choices_that_some_worker_takes() -> None:
    workers = FakeWorker("a", request_limit=4), FakeWorker("b", request_limit=2)

    failure = refusal(seen(*workers, count=5), "m")

    assert failure.param == "n"
    assert "more than 4 requests" in failure.detail
