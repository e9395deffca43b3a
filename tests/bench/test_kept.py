"""The measurements of streams that can be resumed: they run, and report what they have seen."""

import re

from click.testing import CliRunner

from bench import frontend_loss, kept_cost


def test_loss_of_a_frontend_is_measured() -> None:
    done = CliRunner().invoke(frontend_loss.main, ["--streams=2"])

    assert done.exit_code == 0, done.output
    assert done.output.startswith("streams 4, resumed 4, complete 4, equal 4, computed twice: 0 prompt tokens and 0 ")


def test_cost_of_streams_that_can_be_resumed_is_measured() -> None:
    done = CliRunner().invoke(kept_cost.main, ["--streams=2", "--tokens=20", "--rounds=1"])

    assert done.exit_code == 0, done.output
    lines = [re.sub(r"[\d.]+", "N", line) for line in done.output.splitlines()]
    assert lines == [
        "N streams, frontend: N µs a token, N µs if it can be resumed: N times",
        "N streams, worker: N µs a token, N µs if it can be resumed: N times",
    ]
