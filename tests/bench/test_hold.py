"""The hold command loses no stream, leaves nothing behind, and writes its report."""

import json
from dataclasses import replace
from pathlib import Path

from click.testing import CliRunner

from bench.hold import GRPC, HTTP, Options, gap_figures, main

SMALL = ["--streams=20", "--seconds=0.5", "--rate=200", "--itl-ms=20", "--connections=3"]


def test_small_run_loses_no_stream_and_leaves_nothing_behind(tmp_path: Path) -> None:
    outcome = CliRunner().invoke(main, [*SMALL, f"--results={tmp_path}"])

    assert outcome.exit_code == 0, outcome.output
    runs = json.loads((tmp_path / "hold.json").read_text())["runs"]
    assert list(runs) == [HTTP, GRPC]
    for figures in runs.values():
        assert (figures["streams"], figures["lost"], figures["left"], figures["bugs"]) == (20, {}, 0, [])
        assert figures["tokens"] > 20
    assert "| streams held, streams lost | 20, 0 | 20, 0 |" in (tmp_path / "hold.md").read_text()


def test_rpcs_share_the_connections_that_are_asked_for() -> None:
    asked = Options(streams=10_000, connections=100, seconds=1.0, workers=2, rate=1.0, itl_ms=1.0)

    assert (asked.per_connection(HTTP), asked.per_connection(GRPC)) == (1, 100)
    assert replace(asked, streams=20, connections=3).per_connection(GRPC) == 7


def test_stream_is_slow_by_its_own_p99_whatever_the_others() -> None:
    figures = gap_figures([[1.0, 1.0], [1.0, 1.6]])

    assert figures["slow_streams"] == 1
    assert figures["own_p99_ms"] == {"p50": 1600.0, "p99": 1600.0, "max": 1600.0}
