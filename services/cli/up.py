"""`unbroken up`: a registry, workers and frontends on this machine."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from services.cli import frontend, worker
from services.cli.options import env_option, logging_options
from services.cluster.cluster import Cluster
from services.cluster.commands import ClusterConfig, frontend_command, worker_command
from services.cluster.state import default_folder
from services.runtime.log import configure_logging
from services.runtime.process import run_process
from services.runtime.supervision.child import ChildConfig
from services.runtime.supervision.program import PROGRAM

PORT = click.IntRange(0, 65535)
READY_TIMEOUT_S = 120.0
LOADING_TIMEOUT_S = 1800.0
ELSEWHERE = "Options of workers go after --, those of frontends into their DYN_ variables: see their --help."


class _Up(click.Command):
    """Tells whose an option is that it does not have itself."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            ways = _ways(error.option_name) or [ELSEWHERE]
            raise click.UsageError(" ".join([error.format_message(), *ways]), ctx) from error


def _ways(option: str) -> list[str]:
    """How to give an option that is none of `unbroken up` to the processes that have it."""
    line = frontend_command(ClusterConfig(), 0, Path(os.devnull), {}, registry="127.0.0.1:0")
    is_given = any(part.partition("=")[0] == option for part in line)  # It has another name here, as ports have.
    variables = [found.envvar for found in frontend.command.params if option in found.opts and not is_given]
    is_workers = any(option in found.opts for found in worker.command.params)
    return [
        *(f"Frontends take it from {variable}." for variable in variables),
        *(["Workers take it after --."] if is_workers else []),
    ]


@click.command(cls=_Up, short_help="Start a registry, workers and frontends on this machine.")
@click.option("--workers", envvar="DYN_UP_WORKERS", show_envvar=True, default=2, type=click.IntRange(1, 64))
@click.option("--frontends", envvar="DYN_UP_FRONTENDS", show_envvar=True, default=1, type=click.IntRange(1, 64))
@click.option(
    "--engine",
    envvar="DYN_ENGINE",
    show_envvar=True,
    default="mocker",
    type=click.Choice(worker.ENGINES),
    help="mocker makes up its tokens and needs no model. Workers with trtllm all take the same GPU: give --workers 1.",
)
@click.option(
    "--model",
    envvar="DYN_MODEL",
    show_envvar=True,
    help="For llamacpp: a pulled model's name or a path to a GGUF file. For trtllm: a folder with a model of Hugging "
    "Face. The mocker only takes its name.",
)
@click.option(
    "--served-model-name", envvar="DYN_SERVED_MODEL_NAME", show_envvar=True, help="What clients call the model."
)
@click.option(
    "--host",
    envvar="DYN_UP_HOST",
    show_envvar=True,
    default="127.0.0.1",
    help="Where the frontends and the registry listen. Workers serve the frontends of this machine only.",
)
@click.option("--registry-port", envvar="DYN_UP_REGISTRY_PORT", show_envvar=True, default=50050, type=PORT)
@click.option(
    "--grpc-port",
    envvar="DYN_UP_GRPC_PORT",
    show_envvar=True,
    default=50051,
    type=PORT,
    help="Of the first frontend; the others take the ports that follow. 0: any free port.",
)
@click.option(
    "--http-port", envvar="DYN_UP_HTTP_PORT", show_envvar=True, default=8000, type=PORT, help="Likewise, for HTTP."
)
@click.option(
    "--migration-limit",
    envvar="DYN_MIGRATION_LIMIT",
    show_envvar=True,
    default=3,
    type=click.IntRange(min=0),
    help="How often a request may move to another worker; 0 turns moving off.",
)
@click.option(
    "--state-dir",
    envvar="DYN_UP_STATE_DIR",
    show_envvar=True,
    type=click.Path(file_okay=False, path_type=Path),
    default=default_folder,
    show_default="~/.cache/unbroken/run",
    help="Where cluster.json is kept: the pids and addresses of all processes, while all is up.",
)
@env_option("--no-restart", "DYN_UP_NO_RESTART", is_flag=True, help="Leave a process that died dead.")
@click.option(
    "--ready-timeout",
    "ready_timeout_s",
    envvar="DYN_UP_READY_TIMEOUT",
    show_envvar=True,
    type=click.FloatRange(min=0, min_open=True),
    help=f"Seconds that a process may take until it serves. Default: {READY_TIMEOUT_S:g}; with trtllm, which loads for "
    f"minutes, {LOADING_TIMEOUT_S:g}.",
)
@logging_options
@click.argument("worker_options", nargs=-1, type=click.UNPROCESSED, metavar="[-- WORKER OPTIONS...]")
def command(
    *, state_dir: Path, no_restart: bool, ready_timeout_s: float | None, log_level: str, log_format: str, **what: Any
) -> None:
    """Start a registry, workers and frontends on this machine, and keep them alive until Ctrl-C.

    Options after -- go to every worker: see `unbroken worker --help`. Frontends take theirs from the DYN_ variables in
    `unbroken frontend --help`.
    """
    config = ClusterConfig(log_level=log_level, log_format=log_format, **what)
    drain_timeout_s = _check_children(config)
    configure_logging("up", level=log_level, log_format=log_format)
    members = ChildConfig(
        is_restarted=not no_restart,
        ready_timeout_s=ready_timeout_s or (LOADING_TIMEOUT_S if config.engine == "trtllm" else READY_TIMEOUT_S),
        drain_timeout_s=drain_timeout_s,
    )

    run_process(Cluster(config, members, state_dir).run)


def _check_children(config: ClusterConfig) -> float:
    """Read the options of workers and frontends once, as they will, before anything is started.

    Returns how long streams may go on after Ctrl-C: what options and environment come to. Raises what a child would
    refuse them with, each for itself.
    """
    nowhere, nothing = "127.0.0.1:0", Path(os.devnull)
    of_worker = _read("worker", worker.command, worker_command(config, nothing, registry=nowhere))
    of_frontend = _read("frontend", frontend.command, frontend_command(config, 0, nothing, {}, registry=nowhere))
    worker.check_options(of_worker)
    frontend.check_options(of_frontend)
    for name in ("admin_listen", "admin_grpc_listen"):
        if config.frontends > 1 and of_frontend[name] and not of_frontend[name].endswith(":0"):
            raise click.UsageError(f"{of_frontend[name]} would be the admin address of every frontend: use port 0")
    return float(max(of_worker["drain_timeout"], of_frontend["drain_timeout"]))


def _read(name: str, command: click.Command, line: Sequence[str]) -> dict[str, Any]:
    """The options that a child with this command line has."""
    with command.make_context(f"unbroken {name}", [*line[len(PROGRAM) + 1 :]]) as context:
        return context.params
