"""The command line: the one place that reads flags and environment variables.

Each subcommand is a module here with a `command`; it is imported only when it is asked for, so that `unbroken --help`
does not wait for gRPC.
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
    "registry": "Keep the set of instances.",
    "drain": "Let a worker leave: its streams move to others.",
    "models": "Get models for the llamacpp engine.",
}
PREFIX = "DYN_"
NEAR = 0.7
"""How alike a misspelt variable and the one that was meant are, without what all begin with; 1 is the same."""


class _Lazy(click.Group):
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


@click.command(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__, prog_name="unbroken")
def cli() -> None:
    """Unbroken: an LLM request plane whose token streams do not break."""


def main() -> None:
    """The entry point of the distribution."""
    # Its lines from C++ tell people nothing that we do not say better; read when grpc is first imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # What comes to a client is read by the thread that waits for it, rather than handed on by way of three others.
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client")
    _refuse_unknown_variables()
    cli(prog_name="unbroken")


def _refuse_unknown_variables() -> None:
    """A misspelt variable must not be ignored in silence. `known_variables` reads them off the options themselves."""
    given = {name for name in os.environ if name.startswith(PREFIX)}
    if not given:
        return
    known = known_variables()
    unknown = sorted(given - known)
    if unknown:
        meant = [near for name in unknown for near in _near(name, known)]
        way = f"did you mean {', '.join(meant)}?" if meant else "see `unbroken COMMAND --help` for the names"
        raise SystemExit(f"error: no option reads {', '.join(unknown)}: {way}")


def _near(name: str, known: set[str]) -> list[str]:
    """The variable that was probably meant, if there is one."""
    tails = [one.removeprefix(PREFIX) for one in known]
    return [PREFIX + tail for tail in difflib.get_close_matches(name.removeprefix(PREFIX), tails, n=1, cutoff=NEAR)]


def known_variables() -> set[str]:
    """Every environment variable that some option of some subcommand reads."""
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
