"""The command line: the only place that reads options and environment variables.

Each subcommand is a module in this folder with a `command`. It is imported when it is used, so that `unbroken --help`
does not wait for the import of gRPC.
"""

import importlib
import os

import click

from services import __version__
from services.cli.environment import check_environment
from services.runtime.descriptors.standard import flush_output, prepare_streams, use_utf8

COMMANDS = {
    "up": "Start a registry, workers and frontends on this machine.",
    "chat": "Talk to a model in the terminal.",
    "frontend": "Serve clients: gRPC and the OpenAI HTTP API.",
    "worker": "Serve one engine to frontends.",
    "registry": "Keep the set of registered workers.",
    "drain": "Take a worker out of service: its streams move to other workers.",
    "keys": "Make, list and revoke the API keys of tenants.",
    "certs": "Make a CA and certificates for TLS.",
    "models": "Download models for the llamacpp engine.",
}


class _LazyGroup(click.Group):
    """Imports the module of a subcommand when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"services.cli.{cmd_name}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.command(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__, prog_name="unbroken")
def cli() -> None:
    """Unbroken: an LLM request plane whose token streams survive the loss of a worker."""


def main() -> None:
    """The entry point of the distribution."""
    # Both are read when grpc is first imported. gRPC's own log lines repeat errors that this program reports.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # A client's data is read by the thread that waits for it, instead of being passed through three other threads.
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client")
    use_utf8()
    prepare_streams()
    check_environment(known_variables)
    try:
        cli(prog_name="unbroken")
    except OSError:
        flush_output()  # Raises an error of its own if that was the cause.
        raise
    finally:
        flush_output()


def known_variables() -> set[str]:
    """The environment variables that the options of all subcommands read."""
    context = click.Context(cli)
    return {
        variable
        for name in COMMANDS
        if (command := cli.get_command(context, name)) is not None
        for parameter in _parameters(command)
        for variable in ([parameter.envvar] if isinstance(parameter.envvar, str) else parameter.envvar or ())
    }


def _parameters(command: click.Command) -> list[click.Parameter]:
    nested = command.commands.values() if isinstance(command, click.Group) else ()
    return [*command.params, *(parameter for inner in nested for parameter in _parameters(inner))]
