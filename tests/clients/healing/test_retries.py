"""Retries have full jitter, stay within the deadline, and sleep no more than their share of it."""

import pytest

from unbroken_client import RetryPolicy
from unbroken_client.retries import Retries


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def retries(clock: Clock, timeout_s: float | None = 100.0, drawn: float = 1.0, **options: bool) -> Retries:
    return Retries(RetryPolicy(), timeout_s, clock=clock, draw=lambda: drawn, **options)


def test_pauses_are_drawn_below_a_bound_that_doubles_up_to_the_cap(clock: Clock) -> None:
    longest, half = retries(clock), retries(clock, drawn=0.5)

    bounds = [longest.pause_s() for _ in range(7)]

    assert bounds == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0]
    assert [half.pause_s() for _ in range(3)] == [0.125, 0.25, 0.5]


def test_pause_is_no_shorter_than_the_server_asks_for(clock: Clock) -> None:
    assert retries(clock, drawn=0.0).pause_s(at_least_s=3.0) == 3.0


def test_first_attempt_at_each_other_server_is_free(clock: Clock) -> None:
    one = retries(clock)

    assert [one.pause_s(free_count=2) for _ in range(3)] == [0.0, 0.0, 1.0]


def test_time_asleep_is_at_most_the_share_of_the_deadline(clock: Clock) -> None:
    one = retries(clock, timeout_s=10.0)

    assert one.pause_s(at_least_s=4.0) == 4.0
    assert one.pause_s() is None


def test_budget_of_sleep_is_not_refilled_by_progress(clock: Clock) -> None:
    one = retries(clock, timeout_s=10.0)
    one.pause_s(at_least_s=4.0)

    one.progressed()

    assert one.pause_s() is None


@pytest.mark.parametrize(("is_absolute", "pause_s"), [(True, None), (False, 0.25)])
def test_deadline_counts_from_the_last_event_unless_the_user_has_set_it(
    clock: Clock, is_absolute: bool, pause_s: float | None
) -> None:
    one = retries(clock, is_absolute=is_absolute)
    clock.now += 99.9

    one.progressed()

    assert one.pause_s() == pause_s


def test_nothing_is_sent_after_the_deadline(clock: Clock) -> None:
    one = retries(clock)
    clock.now += 100.0

    assert one.pause_s(free_count=1) is None


def test_retries_without_progress_are_bounded(clock: Clock) -> None:
    one = retries(clock, drawn=0.0)

    assert [one.pause_s() for _ in range(21)] == [0.0] * 20 + [None]
    one.progressed()
    assert one.pause_s() == 0.0
