"""Addresses on the command line: what is not host:port is a usage error that names the option."""

import click
import pytest
from click.testing import CliRunner

from services.cli import cli
from services.cli.registry import command

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
def test_each_address_is_checked_wherever_it_is_given(name: str, option: str, variable: str) -> None:
    given = CliRunner().invoke(cli, [name, f"{option}=8001"])
    from_environment = CliRunner().invoke(cli, [name], env={variable: "nowhere"})

    assert (given.exit_code, from_environment.exit_code) == (2, 2)
    assert f"'{option}'" in given.output
    assert "'8001' is not host:port" in given.output
    assert "'nowhere' is not host:port" in from_environment.output


def test_endpoints_of_etcd_may_have_a_scheme() -> None:
    option = next(parameter for parameter in command.params if parameter.name == "etcd_endpoints")
    convert = option.type.convert

    assert convert("https://a:1/, https://[::1]:2", None, None) == ["https://a:1", "https://[::1]:2"]
    for text in ("a:1,https://b:2", "ftp://a:1", "https://a"):
        with pytest.raises(click.BadParameter):
            convert(text, None, None)
