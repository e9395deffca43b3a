"""Pace: tokens take no more than their share of the time, and come no more than a bound later for it."""

import pytest

from services.frontend.pace import REST_S_MAX, REST_S_MIN, TOKENS_SHARE_MAX, rest_s


@pytest.mark.parametrize(
    ("spent_s", "elapsed_s", "rest"),
    [
        (0.0, 60.0, 0.0),
        (0.002, 0.002 / TOKENS_SHARE_MAX, 0.0),
        (0.002, 0.001, 0.002 / TOKENS_SHARE_MAX - 0.001),
        (REST_S_MIN * TOKENS_SHARE_MAX * 0.9, 0.0, 0.0),
        (1.0, 0.0, REST_S_MAX),
    ],
    ids=["nothing to do", "just their share", "more than it", "too short to be worth it", "the bound"],
)
def test_a_rest_is_as_long_as_the_share_asks_for(spent_s: float, elapsed_s: float, rest: float) -> None:
    assert rest_s(spent_s, elapsed_s) == pytest.approx(rest)
