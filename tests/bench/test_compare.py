"""The compare command writes its report and names what it lacks. `make bench-small` runs all of it."""

import json
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from bench.clients.wrk import Load
from bench.compare import load_for, main, parse_streams, write
from bench.comparison.comparison import Comparison, Plan
from bench.comparison.rounds import MACHINE, OURS, PEER, SMG, Round
from bench.comparison.systems import why_missing


def test_stream_gets_as_many_answers_as_fit_the_time_but_at_least_one() -> None:
    assert load_for(16, seconds=5.0, tokens=200) == Load(16, 4, 200)
    assert load_for(16, seconds=0.1, tokens=200) == Load(16, 1, 200)


def test_answers_per_stream_are_bounded_by_the_tokens_of_a_run() -> None:
    assert load_for(1024, seconds=3.6, tokens=200) == Load(1024, 2, 200)
    assert load_for(10_000, seconds=3.6, tokens=200) == Load(10_000, 1, 200)


def test_streams_option_accepts_positive_numbers_only() -> None:
    assert parse_streams("16,64") == [16, 64]
    for text in ("", "0", "16,", "many", "-1"):
        with pytest.raises(click.BadParameter):
            parse_streams(text)


def test_nothing_is_started_without_wrk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "/nowhere")

    outcome = CliRunner().invoke(main, [f"--results={tmp_path}"])

    assert outcome.exit_code == 1
    assert "apt-get install wrk" in outcome.output


def test_peer_that_is_not_installed_is_missing_without_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PEER_HOME", str(tmp_path))

    assert why_missing(PEER) == "Dynamo: the peer is not installed: make peer"
    assert why_missing(SMG) == "SMG: SMG is not installed: make peer-smg"


def test_results_are_written_as_a_page_and_as_json(tmp_path: Path) -> None:
    comparison = Comparison(Plan([], Load(1, 1, 10), [], [OURS]), [Round()], failures=["Dynamo: not requested"])
    comparison.rounds[0].add("floor", 16, MACHINE, {"engine_us": 5.0})

    page = write(tmp_path, comparison, load_before=0.25)

    assert (tmp_path / "latest.md").read_text() == page
    written = json.loads((tmp_path / "latest.json").read_text())
    assert written["rounds"] == [{"parts": {"floor": {"16": {MACHINE: {"engine_us": 5.0}}}}}]
    assert written["failures"][0] == "Dynamo: not requested"
    assert "- load average before: 0.25" in page


def test_results_are_written_without_the_chart_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    page = write(tmp_path, Comparison(Plan([], Load(1, 1, 10), [], [OURS]), [Round()]), load_before=0.25)

    assert "- the chart: " in page
