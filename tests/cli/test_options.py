"""Shared option types: a malformed address is a usage error that names the option."""

import pytest
from click.testing import CliRunner

from services.cli import cli

OPTIONS = [
    ("worker", "--listen", "DYN_WORKER_LISTEN"),
    ("worker", "--advertise", "DYN_WORKER_ADVERTISE"),
    ("worker", "--registry", "DYN_REGISTRY"),
    ("frontend", "--grpc-listen", "DYN_GRPC_LISTEN"),
    ("frontend", "--http-listen", "DYN_HTTP_LISTEN"),
    ("registry", "--listen", "DYN_REGISTRY_LISTEN"),
    ("registry", "--etcd-endpoints", "DYN_ETCD_ENDPOINTS"),
]


@pytest.mark.parametrize(("name", "option", "variable"), OPTIONS)
def test_address_options_are_validated_on_the_command_line_and_in_the_environment(
    name: str, option: str, variable: str
) -> None:
    given = CliRunner().invoke(cli, [name, f"{option}=8001"])
    from_environment = CliRunner().invoke(cli, [name], env={variable: "nowhere"})

    assert (given.exit_code, from_environment.exit_code) == (2, 2)
    assert f"'{option}'" in given.output
    assert "'8001' is not host:port" in given.output
    assert "'nowhere' is not host:port" in from_environment.output
