"""The bench as a command: it writes its report, and says plainly what it lacks. `make bench-small` runs it whole."""

import json
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from bench.clients.wrk import Load
from bench.compare import load_for, main, parse_streams, peer_is_missing, write
from bench.comparison.comparison import Add, Comparison, Plan
from bench.comparison.rounds import MACHINE, OURS, PEER, Round
from bench.measure.errors import BenchError


def test_a_stream_gets_as_many_answers_as_fit_the_time_and_one_at_least() -> None:
    assert load_for(16, seconds=5.0, tokens=200) == Load(16, 4, 200)
    assert load_for(16, seconds=0.1, tokens=200) == Load(16, 1, 200)


def test_many_streams_get_fewer_answers() -> None:
    assert load_for(1024, seconds=3.6, tokens=200) == Load(1024, 2, 200)
    assert load_for(10_000, seconds=3.6, tokens=200) == Load(10_000, 1, 200)


def test_streams_are_positive_numbers() -> None:
    assert parse_streams("16,64") == [16, 64]
    for text in ("", "0", "16,", "many", "-1"):
        with pytest.raises(click.BadParameter):
            parse_streams(text)


def test_grpc_has_the_loads_that_its_measure_can_take() -> None:
    loads = [Load(streams, 1, 10) for streams in (1, 256, 512)]

    assert [load.streams for load in Plan(loads, loads[0], [], [OURS]).grpc_loads] == [1, 256]


def test_without_wrk_nothing_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "/nowhere")

    outcome = CliRunner().invoke(main, [f"--results={tmp_path}"])

    assert outcome.exit_code == 1
    assert "apt-get install wrk" in outcome.output


@pytest.mark.parametrize("system", [OURS, PEER])
def test_a_part_that_fails_is_told_and_only_the_peers_is_pardoned(system: str) -> None:
    comparison = Comparison(Plan([], Load(1, 1, 1), [], [system]), rounds=[Round()])

    def fails(add: Add) -> None:
        add(16, {"tokens_per_s": 5.0})
        raise BenchError("no such thing")

    comparison.attempt("saturated", system, fails)

    assert comparison.failures == [f"round 1, saturated, {system}: no such thing"]
    assert comparison.is_complete == (system == PEER)
    assert comparison.rounds[0].get("saturated", "16", system, "tokens_per_s") == 5.0


def test_a_peer_that_is_not_installed_is_missing_and_not_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PEER_HOME", str(tmp_path))

    assert peer_is_missing() == "Dynamo: the peer is not installed: make peer"


def test_what_was_measured_is_written_as_a_page_and_as_json(tmp_path: Path) -> None:
    comparison = Comparison(Plan([], Load(1, 1, 10), [], [OURS]), [Round()], failures=["Dynamo: not asked for"])
    comparison.rounds[0].add("floor", 16, MACHINE, {"engine_us": 5.0})

    page = write(tmp_path, comparison, load_before=0.25)

    assert (tmp_path / "latest.md").read_text() == page
    written = json.loads((tmp_path / "latest.json").read_text())
    assert written["rounds"] == [{"parts": {"floor": {"16": {MACHINE: {"engine_us": 5.0}}}}}]
    assert written["failures"][0] == "Dynamo: not asked for"
    assert "- load average before: 0.25" in page


def test_without_a_library_for_pictures_the_rest_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    page = write(tmp_path, Comparison(Plan([], Load(1, 1, 10), [], [OURS]), [Round()]), load_before=0.25)

    assert "- the picture: " in page
