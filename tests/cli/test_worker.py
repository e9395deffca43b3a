"""`unbroken worker`: what cannot work is refused before anything is started."""

from dataclasses import fields

import pytest
from click.testing import CliRunner

from services.cli.worker import FAULTS, check_options, command
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


def test_sessions_on_another_host_than_the_one_that_would_be_advertised_are_refused() -> None:
    """Frontends were sent to a port where nothing listened."""
    done = CliRunner().invoke(command, ["--listen=127.0.0.15:7000", "--session-listen=127.0.0.16:7001"])

    assert done.exit_code == 2
    assert "would look for --session-listen 127.0.0.16:7001 on the host of --listen 127.0.0.15:7000" in done.output


@pytest.mark.parametrize(
    "options",
    [
        ["--listen=127.0.0.15:7000", "--session-listen=127.0.0.15:7001"],
        ["--listen=127.0.0.15:7000", "--session-listen=0.0.0.0:7001"],
        ["--listen=127.0.0.15:7000", "--session-listen=127.0.0.16:7001", "--advertise=10.0.0.2:7000"],
    ],
)
def test_sessions_where_frontends_may_find_them_are_not(options: list[str]) -> None:
    check_options(command.make_context("worker", options).params)


def test_muting_a_rank_that_there_is_not_is_refused() -> None:
    """It would have muted nothing, in silence."""
    done = CliRunner().invoke(command, ["--mocker-dp-ranks=2", "--mocker-fault=mute_rank=2"])

    assert done.exit_code == 2
    assert "mute_rank=2: --mocker-dp-ranks gives no such rank" in done.output


def test_help_tells_every_fault_that_the_mocker_knows() -> None:
    shown = CliRunner().invoke(command, ["--help"], terminal_width=10_000).output

    assert set(FAULTS) == {field.name for field in fields(Faults)}
    assert all(f"{name}={meaning}" in shown for name, meaning in FAULTS.items())
