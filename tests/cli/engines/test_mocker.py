"""Mocker options: every fault of the engine can be set and is explained."""

from dataclasses import fields

from click.testing import CliRunner

from services.cli.engines.mocker import FAULTS
from services.cli.worker import command
from services.worker.engines.mocker import Faults


def test_mute_rank_that_does_not_exist_is_refused() -> None:
    """It would have no effect, without a message."""
    done = CliRunner().invoke(command, ["--mocker-dp-ranks=2", "--mocker-fault=mute_rank=2"])

    assert done.exit_code == 2
    assert "mute_rank=2: --mocker-dp-ranks gives no such rank" in done.output


def test_unknown_fault_is_refused_with_the_known_ones() -> None:
    done = CliRunner().invoke(command, ["--mocker-fault=fall_asleep=1"])

    assert done.exit_code == 2
    assert "'fall_asleep=1' is not one of die_after=N" in done.output


def test_help_explains_every_fault() -> None:
    shown = CliRunner().invoke(command, ["--help"], terminal_width=10_000).output

    assert set(FAULTS) == {field.name for field in fields(Faults)}
    assert all(f"{name}={meaning}" in shown for name, meaning in FAULTS.items())
