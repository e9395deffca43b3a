"""The command line: the only place that reads options and environment variables.

Each subcommand is a module in this folder with a `command`. It is imported when it is used, so that `unbroken --help`
does not wait for the import of gRPC.
"""

import difflib
import importlib
import os

import click

from services import __version__

COMMANDS = {
    "up": "Start a registry, workers and frontends on this machine.",
    "chat": "Talk to a model in the terminal.",
    "frontend": "Serve clients: gRPC and the OpenAI HTTP API.",
    "worker": "Serve one engine to frontends.",
    "registry": "Keep the set of registered workers.",
    "drain": "Take a worker out of service: its streams move to other workers.",
    "models": "Download models for the llamacpp engine.",
}
PREFIX = "DYN_"
SIMILARITY_MIN = 0.7
"""How similar a variable must be, without the prefix, to be suggested for a misspelt one. 1: equal."""


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
    _refuse_unknown_variables()
    cli(prog_name="unbroken")


def _refuse_unknown_variables() -> None:
    """Exit with an error if a variable with our prefix belongs to no option: typos must not be ignored silently."""
    given = {name for name in os.environ if name.startswith(PREFIX)}
    if not given:
        return
    known = known_variables()
    unknown = sorted(given - known)
    if unknown:
        similar = [one for name in unknown for one in _similar(name, known)]
        hint = f"did you mean {', '.join(similar)}?" if similar else "see `unbroken COMMAND --help` for the names"
        raise SystemExit(f"error: no option reads {', '.join(unknown)}: {hint}")


def _similar(name: str, known: set[str]) -> list[str]:
    """The known variable that is most similar to `name`, or none."""
    rests = [one.removeprefix(PREFIX) for one in known]
    found = difflib.get_close_matches(name.removeprefix(PREFIX), rests, n=1, cutoff=SIMILARITY_MIN)
    return [PREFIX + rest for rest in found]


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
