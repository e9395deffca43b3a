"""The command line: every option names its environment variable, and a misspelt variable is an error."""

import json
import os
import re
import socket
import subprocess
import sys

import click
import pytest

from services.cli import COMMANDS, cli, known_variables
from tests.support.clock import WAIT_S


def unbroken(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `unbroken ARGUMENTS` with `environment` added to that of the test."""
    return subprocess.run(
        [sys.executable, "-m", "services", *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


def test_help_lists_every_command() -> None:
    done = unbroken("--help")

    assert done.returncode == 0
    assert all(f"  {name} " in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str) -> None:
    done = unbroken(name, "--help")

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"Usage: unbroken {name} ")


def test_help_lists_the_models_that_can_be_pulled() -> None:
    assert "{smollm2}" in unbroken("models", "pull", "--help").stdout


def test_help_shows_environment_variables_and_defaults() -> None:
    text = " ".join(unbroken("up", "--help").stdout.split())

    assert "DYN_MIGRATION_LIMIT" in text
    assert "default: 50051" in text


def test_misspelt_variable_is_refused_with_a_suggestion() -> None:
    done = unbroken("--version", DYN_MIGRATION_LIMITS="3")

    assert done.returncode == 1
    assert done.stderr == "error: no option reads DYN_MIGRATION_LIMITS: did you mean DYN_MIGRATION_LIMIT?\n"


@pytest.mark.parametrize("variable", ["DYN_QQQQQQ", "DYN_NAMESPACE", "DYN_FRONTEND_SERVICE_HOST"])
def test_variable_of_another_program_is_ignored(variable: str) -> None:
    done = unbroken("--version", **{variable: "3"})

    assert (done.returncode, done.stderr) == (0, "")


def test_known_variable_is_read() -> None:
    done = unbroken("up", DYN_MIGRATION_LIMIT="many")

    assert done.returncode == 2
    assert "DYN_MIGRATION_LIMIT" in done.stderr or "--migration-limit" in done.stderr


def test_variables_of_compatible_systems_are_known() -> None:
    assert {"DYN_MIGRATION_LIMIT", "DYN_LOG_LEVEL", "DYN_REGISTRY"} <= known_variables()


@pytest.mark.parametrize(
    "command",
    [
        ("registry", "--listen"),
        ("frontend", "--grpc-listen"),
        ("frontend", "--grpc-listen", "--processes=2"),
        ("frontend", "--http-listen", "--processes=2", "--grpc-listen=127.0.0.1:0"),
        ("worker", "--listen"),
    ],
)
def test_port_in_use_is_reported_in_one_line(command: tuple[str, ...]) -> None:
    """A bug: gRPC printed lines of its own before it."""
    name, option, *others = command
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = unbroken(name, f"{option}=127.0.0.1:{taken.getsockname()[1]}", "--log-level=error", *others)

    assert done.returncode == 1
    assert re.fullmatch(rf"error: cannot listen .* or give another {option}\n", done.stderr)


def grpc_experiments(**environment: str) -> tuple[str, str]:
    """The value of GRPC_EXPERIMENTS that the command line sets, and what gRPC writes to stderr about it."""
    code = """
import atexit, os
from services.cli import main

def use_grpc():
    import grpc
    grpc.insecure_channel("127.0.0.1:1").close()
    print(os.environ["GRPC_EXPERIMENTS"])

atexit.register(use_grpc)
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, "models"],
        env=os.environ | {"GRPC_VERBOSITY": "ERROR"} | environment,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    return done.stdout.splitlines()[-1], done.stderr


def test_grpc_reads_on_the_waiting_thread() -> None:
    value, stderr = grpc_experiments()

    assert value == "-event_engine_client"
    assert "experiment" not in stderr


def test_operators_grpc_experiments_are_kept() -> None:
    value, stderr = grpc_experiments(GRPC_EXPERIMENTS="-no_such_thing")

    assert value == "-no_such_thing"
    assert "Unknown experiment: no_such_thing" in stderr


def test_unknown_command_is_refused() -> None:
    done = unbroken("wroker")

    assert done.returncode == 2
    assert "wroker" in done.stderr


def test_every_option_has_a_variable_except_those_of_one_process_or_call() -> None:
    """These options belong to one process or one call; a variable would set them for all."""
    context = click.Context(cli)
    commands = [command for name in COMMANDS if (command := cli.get_command(context, name)) is not None]
    silent = {
        option.opts[0]
        for command in commands
        for option in command.params
        if isinstance(option, click.Option) and not (option.envvar and option.show_envvar)
    }

    assert silent == {"--ready-file", "--mocker-fault", "--member", "--host", "--domain", "--days"}


@pytest.mark.parametrize("name", ["frontend", "worker", "registry"])
def test_process_logs_its_configuration_once_without_secrets(name: str) -> None:
    started = subprocess.Popen(
        [sys.executable, "-m", "services", name, "--log-format=json"],
        env=os.environ | {"DYN_REGISTRY_STORE": "etcd", "DYN_ETCD_AUTH_PASSWORD": "sesame"}
        if name == "registry"
        else None,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert started.stderr is not None
    try:
        first = json.loads(started.stderr.readline())
    finally:
        started.terminate()
        rest = started.communicate(timeout=WAIT_S)[1]

    assert (first["event"], first["process"]) == ("configuration", name)
    assert first["config"].startswith(f"{name.title()}Config(")
    assert "listen='127.0.0.1:" in first["config"]
    assert "sesame" not in first["config"] + rest
