"""The bench as a command: it runs whole and writes its report, and says plainly what it lacks."""

import json
import shutil
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from bench.bare_send import send_us
from bench.compare import answers_for, main, parse_streams

SMALL = ["--rounds=1", "--streams=1,3", "--tokens=10", "--seconds=0.1"]


def test_a_stream_gets_as_many_answers_as_fit_the_time_and_one_at_least() -> None:
    assert answers_for(5.0, 200) == 4
    assert answers_for(0.1, 200) == 1


def test_streams_are_positive_numbers() -> None:
    assert parse_streams("16,64") == [16, 64]
    for text in ("", "0", "16,", "many", "-1"):
        with pytest.raises(click.BadParameter):
            parse_streams(text)


def test_without_wrk_nothing_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "/nowhere")

    outcome = CliRunner().invoke(main, [*SMALL, f"--results={tmp_path}"])

    assert outcome.exit_code == 1
    assert "apt-get install wrk" in outcome.output


def test_a_bare_send_takes_time() -> None:
    assert send_us(size=100, streams=500) > 0


@pytest.mark.skipif(shutil.which("wrk") is None, reason="needs wrk")
def test_a_small_run_without_the_peer_measures_ours_and_says_why_the_other_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As on a machine where it is not installed."""
    monkeypatch.setenv("PEER_HOME", str(tmp_path / "no-peer"))

    outcome = CliRunner().invoke(main, [*SMALL, f"--results={tmp_path}"])

    assert outcome.exit_code == 0, outcome.output
    written = json.loads((tmp_path / "latest.json").read_text())
    assert list(written["streams"]) == ["1", "3"]
    for systems in written["streams"].values():
        assert [(name, len(rounds)) for name, rounds in systems.items()] == [("unbroken", 1)]
    assert "- Dynamo is missing: the peer is not installed: make peer" in (tmp_path / "latest.md").read_text()
