"""Backoff: the delay before another try is random, below a bound that doubles with each failed try."""

import random

from services.runtime.backoff import Backoff


def test_delays_are_drawn_evenly_below_a_bound_that_grows_to_the_cap() -> None:
    backoff, rng = Backoff(base_s=0.1, cap_s=1.0), random.Random(1)

    waits = [[backoff.delay_s(tries, rng) for _ in range(200)] for tries in (0, 2, 9, 10_000)]

    assert [round(max(wait), 1) for wait in waits] == [0.1, 0.4, 1.0, 1.0]
    assert all(min(wait) < bound / 10 for wait, bound in zip(waits, (0.1, 0.4, 1.0, 1.0), strict=True))
