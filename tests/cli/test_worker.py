"""`unbroken worker`: what cannot work is refused before anything is started."""

from dataclasses import fields

import pytest
from click.testing import CliRunner

from services.cli.worker import FAULTS, command
from services.worker.engines.mocker import Faults


@pytest.mark.parametrize(
    "options", [["--listen=0.0.0.0:0"], ["--listen=[::]:7000"], ["--listen=0.0.0.0:0", "--advertise=0.0.0.0:7000"]]
)
def test_an_address_that_nobody_can_reach_is_refused(options: list[str]) -> None:
    """Frontends on other machines would have called themselves."""
    done = CliRunner().invoke(command, options)

    assert done.exit_code == 2
    assert f"{options[-1].replace('=', ' ')} is no address that frontends can reach" in done.output
    assert "--advertise host:port" in done.output


def test_muting_a_rank_that_there_is_not_is_refused() -> None:
    """It would have muted nothing, in silence."""
    done = CliRunner().invoke(command, ["--mocker-dp-ranks=2", "--mocker-fault=mute_rank=2"])

    assert done.exit_code == 2
    assert "mute_rank=2: --mocker-dp-ranks gives no such rank" in done.output


def test_help_tells_every_fault_that_the_mocker_knows() -> None:
    shown = CliRunner().invoke(command, ["--help"], terminal_width=10_000).output

    assert set(FAULTS) == {field.name for field in fields(Faults)}
    assert all(f"{name}={meaning}" in shown for name, meaning in FAULTS.items())
