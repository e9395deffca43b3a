"""A bucket: what comes at a rate is saved up for a minute, may be overdrawn, and is promised to one after another."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.limits.bucket import LEAST, WINDOW_S, Bucket


def test_new_bucket_holds_what_comes_in_a_minute() -> None:
    assert Bucket(600, 5.0).left(600, 5.0) == 600


def test_what_was_taken_comes_back_at_the_rate_and_no_more_than_a_minutes() -> None:
    bucket = Bucket(600, 0.0)
    bucket.take(600)

    assert [bucket.left(600, now) for now in (0.0, 0.1, 30.0, 60.0, 1000.0)] == [0, 1, 300, 600, 600]


def test_debt_is_paid_first() -> None:
    bucket = Bucket(60, 0.0)
    bucket.take(90)

    assert bucket.left(60, 29.0) == -1
    assert bucket.left(60, 31.0) == 1


def test_what_is_left_changes_with_the_rate_in_proportion() -> None:
    bucket = Bucket(600, 0.0)
    bucket.take(300)

    assert bucket.left(300, 0.0) == 150
    assert bucket.left(600, 0.0) == 300


def test_debt_is_no_smaller_at_a_lower_rate() -> None:
    bucket = Bucket(600, 0.0)
    bucket.take(900)

    assert bucket.left(300, 0.0) == -300


def test_rate_below_one_a_minute_lets_one_through_at_last() -> None:
    bucket = Bucket(0.5, 0.0)
    assert bucket.left(0.5, 0.0) == LEAST
    bucket.take(1)

    wait_s = bucket.promise_s(0.5, 0.0, random.Random(0))

    assert wait_s == 120.0
    assert bucket.left(0.5, wait_s) == pytest.approx(LEAST)


def test_those_that_are_refused_together_are_told_times_one_after_another() -> None:
    bucket = Bucket(60, 0.0)
    bucket.take(60)

    assert [bucket.promise_s(60, 0.0, random.Random(0)) for _ in range(3)] == [1.0, 2.0, 3.0]


def test_nobody_is_told_to_wait_for_more_than_a_minute_unless_for_a_debt() -> None:
    bucket, rng = Bucket(60, 0.0), random.Random(0)
    bucket.take(60)
    promises = [bucket.promise_s(60, 0.0, rng) for _ in range(200)]

    assert promises[:60] == [float(number) for number in range(1, 61)]
    assert all(WINDOW_S / 2 <= one <= WINDOW_S for one in promises[60:])
    bucket.take(600)
    assert bucket.promise_s(60, 0.0, rng) >= 601.0


def test_turns_that_nobody_took_go_to_others() -> None:
    bucket, rng = Bucket(60, 0.0), random.Random(0)
    bucket.take(60)
    for _ in range(50):
        bucket.promise_s(60, 0.0, rng)

    assert bucket.left(60, 1.0) == 1, "whoever asks is served"
    bucket.take(bucket.left(60, 120.0))
    assert bucket.promise_s(60, 120.0, rng) == 1.0, "no promise lasts for ever"


@given(
    rate=st.floats(0.5, 1e6),
    steps=st.lists(st.tuples(st.floats(0, 30), st.floats(0, 50), st.floats(0.1, 1)), max_size=30),
)
def test_no_more_is_taken_than_a_bucket_and_what_has_come(rate: float, steps: list[tuple[float, float, float]]) -> None:
    """Whatever the share of the rate is from time to time, if each taker asks first and takes one."""
    bucket, now, taken = Bucket(rate, 0.0), 0.0, 0
    for pause_s, wanted, share in steps:
        now += pause_s
        for _ in range(int(wanted)):
            if bucket.left(rate * share, now) >= LEAST:
                bucket.take(1)
                taken += 1

    assert taken <= max(rate, LEAST) + rate * now / WINDOW_S + 1
