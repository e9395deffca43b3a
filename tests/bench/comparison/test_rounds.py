"""Rounds: medians and ranges, ratios within a round, and nothing where nothing was measured."""

import pytest

from bench.comparison.rounds import MACHINE, OURS, PEER, Round, Spread, ratios, rows, spread, values


def test_a_spread_is_the_median_and_the_range_in_any_order() -> None:
    assert spread([3.0, 1.0, 2.0]) == Spread(median=2.0, least=1.0, most=3.0)
    assert spread([1.0, None, 2.0]) == Spread(median=1.5, least=1.0, most=2.0)
    assert spread([None]) is None


def test_a_spread_has_three_digits_or_all_before_the_point_and_no_range_of_one_value() -> None:
    assert str(Spread(12.345, 0.98765, 12345.6)) == "12.3 (0.988 to 12,346)"
    assert str(Spread(200.0, 200.0, 200.0)) == "200"


def test_a_ratio_is_that_of_one_round() -> None:
    """The machine was twice as slow in the second: the ratio is the same."""
    assert ratios([10, 20], [20, 40]) == [0.5, 0.5]


def test_a_round_without_one_of_them_has_no_ratio_and_shifts_no_other() -> None:
    assert ratios([10, None, 30], [20, 40, 60]) == [0.5, None, 0.5]
    assert ratios([10], [0.0]) == [None]


def test_what_one_round_lacks_is_none_in_its_place() -> None:
    first, second = Round(), Round()
    second.add("http", 16, OURS, {"cpu_us_per_token": 5.0})
    first.add("http", 64, OURS, {"cpu_us_per_token": 4.0})

    assert values([first, second], "http", "16", OURS, "cpu_us_per_token") == [None, 5.0]
    assert rows([first, second], "http") == ["64", "16"]


def test_figures_of_one_row_add_up() -> None:
    one = Round()
    one.add("http", 16, OURS, {"cpu_us_per_token": 5.0})
    one.add("http", 16, OURS, {"first_token_ms_p50": 9.0})

    assert one.parts["http"]["16"][OURS] == {"cpu_us_per_token": 5.0, "first_token_ms_p50": 9.0}


@pytest.mark.parametrize("has_floor", [True, False])
def test_cost_in_sends_is_both_systems_and_the_planes_share_is_ours(has_floor: bool) -> None:
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
