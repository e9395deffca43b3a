"""Rounds yield medians, ranges and ratios within a round, and no value where nothing was measured."""

import pytest

from bench.comparison.rounds import MACHINE, OURS, PEER, Round, Spread, ratios, rows, spread, values


def test_spread_is_the_median_and_range_of_unsorted_values() -> None:
    assert spread([3.0, 1.0, 2.0]) == Spread(median=2.0, least=1.0, most=3.0)
    assert spread([1.0, None, 2.0]) == Spread(median=1.5, least=1.0, most=2.0)
    assert spread([None]) is None


def test_spread_shows_three_digits_and_no_range_for_a_single_value() -> None:
    assert str(Spread(12.345, 0.98765, 12345.6)) == "12.3 (0.988 to 12,346)"
    assert str(Spread(200.0, 200.0, 200.0)) == "200"


def test_ratio_is_computed_within_each_round() -> None:
    """The machine is twice as slow in the second round, and the ratio is the same."""
    assert ratios([10, 20], [20, 40]) == [0.5, 0.5]


def test_round_that_lacks_a_system_has_no_ratio() -> None:
    assert ratios([10, None, 30], [20, 40, 60]) == [0.5, None, 0.5]
    assert ratios([10], [0.0]) == [None]


def test_value_that_a_round_lacks_is_none_at_its_place() -> None:
    first, second = Round(), Round()
    second.add("http", 16, OURS, {"cpu_us_per_token": 5.0})
    first.add("http", 64, OURS, {"cpu_us_per_token": 4.0})

    assert values([first, second], "http", "16", OURS, "cpu_us_per_token") == [None, 5.0]
    assert rows([first, second], "http") == ["64", "16"]


def test_figures_of_one_row_are_merged() -> None:
    one = Round()
    one.add("http", 16, OURS, {"cpu_us_per_token": 5.0})
    one.add("http", 16, OURS, {"first_token_ms_p50": 9.0})

    assert one.parts["http"]["16"][OURS] == {"cpu_us_per_token": 5.0, "first_token_ms_p50": 9.0}


@pytest.mark.parametrize("has_floor", [True, False])
def test_derived_figures_need_the_lower_bounds_of_the_round(has_floor: bool) -> None:
    one = Round()
    for name in (OURS, PEER):
        one.add("http", 16, name, {"cpu_us_per_token": 10.0, "workers_us_per_token": 12.0})
    if has_floor:
        one.add("floor", 16, MACHINE, {"send_us": 4.0, "engine_us": 3.0})

    one.derive()

    assert one.get("http", "16", OURS, "cpu_in_sends") == (2.5 if has_floor else None)
    assert one.get("http", "16", PEER, "cpu_in_sends") == (2.5 if has_floor else None)
    assert one.get("http", "16", OURS, "plane_us_per_token") == (9.0 if has_floor else None)
    assert one.get("http", "16", PEER, "plane_us_per_token") is None
