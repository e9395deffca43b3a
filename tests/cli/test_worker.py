"""`unbroken worker`: options reach the configuration, and addresses that frontends could not reach are refused."""

import pytest
from click.testing import CliRunner

from services.cli.worker import check_options, command, worker_config
from services.worker.generations.store import DetachConfig


@pytest.mark.parametrize(
    "options", [["--listen=0.0.0.0:0"], ["--listen=[::]:7000"], ["--listen=0.0.0.0:0", "--advertise=0.0.0.0:7000"]]
)
def test_wildcard_address_is_not_advertised(options: list[str]) -> None:
    """Frontends on other machines would connect to themselves."""
    done = CliRunner().invoke(command, options)

    assert done.exit_code == 2
    assert f"{options[-1].replace('=', ' ')} is not an address that frontends can reach" in done.output
    assert "--advertise host:port" in done.output


def test_session_address_on_another_host_than_the_advertised_one_is_refused() -> None:
    """Frontends would connect to a port on which nothing listens."""
    done = CliRunner().invoke(command, ["--listen=127.0.0.15:7000", "--session-listen=127.0.0.16:7001"])

    assert done.exit_code == 2
    assert "would connect to --session-listen 127.0.0.16:7001 on the host of --listen 127.0.0.15:7000" in done.output


@pytest.mark.parametrize(
    "options",
    [
        ["--listen=127.0.0.15:7000", "--session-listen=127.0.0.15:7001"],
        ["--listen=127.0.0.15:7000", "--session-listen=0.0.0.0:7001"],
        ["--listen=127.0.0.15:7000", "--session-listen=127.0.0.16:7001", "--advertise=10.0.0.2:7000"],
    ],
)
def test_session_address_that_frontends_can_reach_is_accepted(options: list[str]) -> None:
    check_options(command.make_context("worker", options).params)


def test_bounds_of_answers_without_a_frontend_reach_the_worker() -> None:
    options = ["--detach-grace-max=60", "--detached-limit=7", "--detached-mb=2"]
    given = command.make_context("worker", options).params

    assert worker_config(command.make_context("worker", []).params).session.detach == DetachConfig()
    detach = worker_config(given).session.detach
    assert detach == DetachConfig(grace_s_max=60, records_max=7, bytes_max=2 * 1024 * 1024)
