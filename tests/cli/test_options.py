"""Shared option types: a malformed address or number is a usage error that names the option."""

from typing import Any

import click
import pytest
from click.testing import CliRunner

from services.cli import cli
from services.cli.options import Integer, Number
from tests.docs.tables import command_named, names_of_commands

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


NUMERIC = (click.IntRange, click.FloatRange, click.types.IntParamType, click.types.FloatParamType)
NO_NUMBERS = ("nan", "inf", "-inf", "1e400", str(10**30), "9" * 5000, "")


NUMBERS: list[Any] = [
    pytest.param(name, option.opts[0], id=f"{name} {option.opts[0]}")
    for name in names_of_commands()
    for option in command_named(name).params
    if isinstance(option.type, NUMERIC)
]


@pytest.mark.parametrize(("name", "option"), NUMBERS)
def test_every_number_is_finite_and_has_an_upper_bound(name: str, option: str) -> None:
    """Bug: `--request-timeout nan` started a frontend whose chats were all failures of the server."""
    for given in NO_NUMBERS:
        refused = CliRunner().invoke(cli, [*name.split(), f"{option}={given}"])

        assert refused.exit_code == 2, (given, refused.output)
        assert f"Invalid value for '{option}'" in refused.output, given
        assert "is not a" in refused.output
        assert len(refused.output) < 1000


@pytest.mark.parametrize(("name", "option"), NUMBERS)
def test_bounds_of_a_number_are_values_that_its_option_takes(name: str, option: str) -> None:
    kind = next(one.type for one in command_named(name).params if option in one.opts)

    assert isinstance(kind, Integer | Number)
    assert kind.convert(str(kind.most), None, None) == kind.most
    least = kind.least if not kind.min_open else kind.most / 2
    assert kind.convert(str(least), None, None) == least
    with pytest.raises(click.BadParameter):
        kind.convert(str(kind.most + 1), None, None)
    with pytest.raises(click.BadParameter):
        kind.convert(str(kind.least - 1), None, None)


@pytest.mark.parametrize("given", ["die_after=nan", "die_after=²", f"die_after={10**30}", "die_after=" + "9" * 5000])
def test_number_of_a_fault_is_bounded(given: str) -> None:
    """Bug: a digit that int() does not know ended in a traceback."""
    refused = CliRunner().invoke(cli, ["worker", f"--mocker-fault={given}"])

    assert refused.exit_code == 2
    assert "Invalid value for '--mocker-fault'" in refused.output
