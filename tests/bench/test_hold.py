"""The hold command loses no stream, leaves nothing behind, and writes its report."""

import json
from pathlib import Path

from click.testing import CliRunner

from bench.hold import gap_figures, main

SMALL = ["--streams=20", "--seconds=0.5", "--rate=200", "--itl-ms=20"]


def test_small_run_loses_no_stream_and_leaves_nothing_behind(tmp_path: Path) -> None:
    outcome = CliRunner().invoke(main, [*SMALL, f"--results={tmp_path}"])

    assert outcome.exit_code == 0, outcome.output
    figures = json.loads((tmp_path / "hold.json").read_text())
    assert (figures["streams"], figures["lost"], figures["left"], figures["bugs"]) == (20, {}, 0, [])
    assert figures["tokens"] > 20
    assert "| streams held, streams lost | 20, 0 |" in (tmp_path / "hold.md").read_text()


def test_stream_is_slow_by_its_own_p99_whatever_the_others() -> None:
    figures = gap_figures([[1.0, 1.0], [1.0, 1.6]])

    assert figures["slow_streams"] == 1
    assert figures["own_p99_ms"] == {"p50": 1600.0, "p99": 1600.0, "max": 1600.0}
