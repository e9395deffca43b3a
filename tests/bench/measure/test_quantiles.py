"""A quantile is one of the values, and too few values have none."""

import pytest

from bench.measure.quantiles import milliseconds, quantile


@pytest.mark.parametrize(("share", "expected"), [(0.5, 50), (0.75, 75), (0.99, 99), (0.0, 0)])
def test_quantile_is_one_of_the_unsorted_values(share: float, expected: float) -> None:
    assert quantile([*range(99, -1, -1)], share) == expected


def test_too_few_values_have_no_high_quantile() -> None:
    assert quantile([1.0] * 199, 0.999) is None
    assert quantile([1.0] * 200, 0.999) == 1.0
    assert quantile([], 0.5) is None


def test_quantiles_are_named_and_in_milliseconds() -> None:
    assert milliseconds([0.25] * 100, "gap_ms") == {"gap_ms_p50": 250.0, "gap_ms_p99": 250.0, "gap_ms_p99.9": None}
