"""`unbroken worker`: what cannot work is refused before anything is started."""

import pytest
from click.testing import CliRunner

from services.cli.worker import command


@pytest.mark.parametrize(
    "options", [["--listen=0.0.0.0:0"], ["--listen=[::]:7000"], ["--listen=0.0.0.0:0", "--advertise=0.0.0.0:7000"]]
)
def test_an_address_that_nobody_can_reach_is_refused(options: list[str]) -> None:
    """Frontends on other machines would have called themselves."""
    done = CliRunner().invoke(command, options)

    assert done.exit_code == 2
    assert f"{options[-1].replace('=', ' ')} is no address that frontends can reach" in done.output
    assert "--advertise host:port" in done.output
