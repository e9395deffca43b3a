"""Costs at several sizes become a table and a chart that show which of them grow."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.growth.curve import Cost, Curve, cost_of, draw, growth, table
from tests.support.doubles import run_async


async def halves(size: int, repeats: int) -> Sequence[float]:
    return [size / 2 + number for number in range(repeats)]


FLAT = Curve("a group", "stay", "workers", (1, 10), halves)
STEEP = Curve("another group", "grow", "streams", (10, 100), halves, unit="KiB")


def cost(median: float) -> Cost:
    return Cost(median, median - 1, median + 1)


COSTS = {FLAT: {1: cost(5.0), 10: cost(4.0)}, STEEP: {10: cost(20.0), 100: cost(2000.0)}}


def test_cost_is_the_median_of_its_repeats_with_their_range() -> None:
    assert run_async(cost_of(FLAT, 10, 5)) == Cost(7.0, 5.0, 9.0)


def test_growth_compares_the_largest_size_with_the_lowest_cost() -> None:
    assert [growth(each) for each in COSTS.values()] == [1.0, 100.0]


def test_table_has_a_column_per_size_and_empty_cells_for_unmeasured_sizes() -> None:
    assert table(COSTS).splitlines() == [
        "| cost of | against | 1 | 10 | 100 | grows |",
        "| --- | --- | --- | --- | --- | --- |",
        "| stay, µs | workers | 5 | 4 |  | 1.0 × |",
        "| grow, KiB | streams |  | 20 | 2,000 | 100.0 × |",
    ]


def test_chart_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")

    draw(COSTS, tmp_path / "picture.png")

    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
