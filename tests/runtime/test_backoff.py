"""Backoff delays are random between 0 and a limit that doubles with each try, up to a cap."""

import random

import pytest

from services.runtime.backoff import Backoff

BACKOFF = Backoff(base_s=0.1, cap_s=1.0)


def delays_s(tries: int) -> list[float]:
    rng = random.Random(0)
    return [BACKOFF.delay_s(tries, rng) for _ in range(2000)]


@pytest.mark.parametrize(("tries", "limit_s"), [(0, 0.1), (1, 0.2), (3, 0.8), (4, 1.0), (10_000, 1.0)])
def test_delay_is_spread_evenly_up_to_the_limit(tries: int, limit_s: float) -> None:
    delays = delays_s(tries)

    assert 0 <= min(delays) < limit_s / 100
    assert limit_s * 0.99 < max(delays) <= limit_s
    assert sum(delays) / len(delays) == pytest.approx(limit_s / 2, rel=0.05)


def test_delays_are_reproducible_from_the_seed() -> None:
    assert delays_s(3) == delays_s(3)
