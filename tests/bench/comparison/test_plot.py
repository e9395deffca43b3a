"""The chart has a line for each measured system, with the ranges of its rounds."""

from pathlib import Path

import pytest

from bench.comparison.plot import Line, draw, series
from bench.comparison.rounds import OURS, PEER, Round

LINE = Line(OURS, "cpu_us_per_token")


def measured(cpu_us: float) -> Round:
    one = Round()
    one.add("http", 16, OURS, {"cpu_us_per_token": cpu_us, "tokens_per_s": 100.0, "first_token_ms_p50": 9.0})
    one.add("http", 64, PEER, {"cpu_us_per_token": cpu_us, "tokens_per_s": 90.0, "first_token_ms_p50": 12.0})
    return one


def test_point_is_a_median_with_its_range() -> None:
    assert series([measured(10.0), measured(30.0), measured(12.0)], LINE) == [(16, 12.0, 2.0, 18.0)]


def test_figure_that_was_not_measured_has_no_point() -> None:
    assert series([measured(1.0)], Line(PEER, "cpu_in_sends")) == []


def test_chart_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")

    draw([measured(10.0)], tmp_path / "it.png")

    assert (tmp_path / "it.png").read_bytes().startswith(b"\x89PNG")
