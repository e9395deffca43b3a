"""What a refusal tells: when to come back, and how full the workers are."""

import random

import pytest

from services.core.errors import jittered_s
from services.frontend.routing.load import Occupancy
from services.frontend.routing.rejection import metadata_of, retry_after_s


def bounds(*workers: Occupancy) -> tuple[float, float]:
    """The least and the most of many draws."""
    rng = random.Random(7)
    draws = [jittered_s(retry_after_s(workers), rng) for _ in range(2_000)]
    return round(min(draws), 1), round(max(draws), 1)


def test_is_how_long_it_takes_a_queue_to_be_worked_off_give_or_take_a_fifth() -> None:
    assert bounds(Occupancy(slots=4, waiting=7, service_s=5.0)) == (8.0, 12.0)


def test_the_worker_that_has_room_soonest_counts() -> None:
    slow, soon = Occupancy(slots=1, waiting=9, service_s=5.0), Occupancy(slots=2, waiting=3, service_s=5.0)

    assert bounds(slow, soon) == (8.0, 12.0)


@pytest.mark.parametrize(
    "workers", [(), (Occupancy(slots=2, waiting=5),), (Occupancy(waiting=5, service_s=9.0),)], ids=str
)
def test_where_nothing_is_known_it_is_a_second_or_a_little_more(workers: tuple[Occupancy, ...]) -> None:
    assert bounds(*workers) == (1.0, 1.5)


def test_a_worker_of_which_nothing_is_known_does_not_hide_one_of_which_it_is() -> None:
    assert bounds(Occupancy(), Occupancy(slots=1, waiting=1, service_s=5.0)) == (8.0, 12.0)


@pytest.mark.parametrize(("service_s", "expected"), [(0.001, (1.0, 1.5)), (10_000.0, (40.0, 60.0))])
def test_is_never_less_than_a_second_and_never_more_than_a_minute(
    service_s: float, expected: tuple[float, float]
) -> None:
    assert bounds(Occupancy(slots=1, service_s=service_s)) == expected


@pytest.mark.parametrize("seconds", [0.0, 1.0, 10.0, 60.0, 1e9])
def test_those_that_are_refused_together_do_not_come_back_together(seconds: float) -> None:
    rng = random.Random(1)

    assert len({jittered_s(seconds, rng) for _ in range(50)}) == 50


def test_limits_and_load_of_all_workers_are_told_together() -> None:
    workers = [Occupancy(slots=4, places=2, running=4, waiting=1), Occupancy(slots=8, places=0, running=3)]

    assert metadata_of(workers) == {
        "engine_request_limit": "12",
        "request_queue_limit": "2",
        "running": "7",
        "waiting": "1",
    }
