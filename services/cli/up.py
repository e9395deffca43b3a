"""`unbroken up`: runs a registry, workers and frontends on this machine."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from services.cli import frontend, worker
from services.cli.environment import start_logging
from services.cli.options import DAY_S, Integer, Number, env_option, logging_options
from services.cluster.cluster import Cluster
from services.cluster.commands import ClusterConfig, frontend_command, worker_command
from services.cluster.state import default_folder
from services.runtime.process import StartupError, run_process
from services.runtime.supervision.child import ChildConfig
from services.runtime.supervision.program import PROGRAM

PORT = Integer(0, 65535)
READY_TIMEOUT_S = 120.0
LOADING_TIMEOUT_S = 1800.0
ELSEWHERE = "Options of workers go after --. Options of frontends are set by their DYN_ variables: see their --help."


def _default_folder() -> Path:
    try:
        return default_folder()
    except StartupError as error:
        raise click.UsageError(f"{error}, or give --state-dir") from error


class _Up(click.Command):
    """For an unknown option, explains how to pass it to workers or frontends that have it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            hints = _hints(error.option_name) or [ELSEWHERE]
            raise click.UsageError(" ".join([error.format_message(), *hints]), ctx) from error


def _hints(option: str) -> list[str]:
    """How to pass an option that `unbroken up` does not have to the processes that have it."""
    line = frontend_command(ClusterConfig(), 0, Path(os.devnull), {}, registry="127.0.0.1:0")
    is_given = any(part.partition("=")[0] == option for part in line)  # `up` sets it from an option of its own.
    variables = [found.envvar for found in frontend.command.params if option in found.opts and not is_given]
    is_workers = any(option in found.opts for found in worker.command.params)
    return [
        *(f"Frontends read it from {variable}." for variable in variables),
        *(["Workers accept it after --."] if is_workers else []),
    ]


@click.command(cls=_Up, short_help="Start a registry, workers and frontends on this machine.")
@env_option("--workers", "DYN_UP_WORKERS", default=2, type=Integer(1, 64), help="Number of workers.")
@env_option("--frontends", "DYN_UP_FRONTENDS", default=1, type=Integer(1, 64), help="Number of frontends.")
@click.option(
    "--engine",
    envvar="DYN_ENGINE",
    show_envvar=True,
    default="mocker",
    type=click.Choice([*worker.ENGINES]),
    help="mocker generates made-up tokens and needs no model. All trtllm workers use the same GPU: set --workers 1.",
)
@click.option(
    "--model",
    envvar="DYN_MODEL",
    show_envvar=True,
    help="For llamacpp: the name of a pulled model, or a GGUF file. For trtllm: a folder with a Hugging Face model. "
    "mocker uses it as the model's name.",
)
@env_option("--served-model-name", "DYN_SERVED_MODEL_NAME", help="The model's name for clients.")
@click.option(
    "--host",
    envvar="DYN_UP_HOST",
    show_envvar=True,
    default="127.0.0.1",
    help="Address on which the frontends and the registry listen. Workers only serve frontends on this machine.",
)
@env_option("--registry-port", "DYN_UP_REGISTRY_PORT", default=50050, type=PORT, help="0: any free port.")
@click.option(
    "--grpc-port",
    envvar="DYN_UP_GRPC_PORT",
    show_envvar=True,
    default=50051,
    type=PORT,
    help="gRPC port of the first frontend. The others take the ports that follow. 0: any free port.",
)
@click.option(
    "--http-port",
    envvar="DYN_UP_HTTP_PORT",
    show_envvar=True,
    default=8000,
    type=PORT,
    help="HTTP port of the first frontend. The others take the ports that follow. 0: any free port.",
)
@click.option(
    "--migration-limit",
    envvar="DYN_MIGRATION_LIMIT",
    show_envvar=True,
    default=3,
    type=Integer(0),
    help="How often a request may move to another worker. 0: never.",
)
@click.option(
    "--state-dir",
    envvar="DYN_UP_STATE_DIR",
    show_envvar=True,
    type=click.Path(file_okay=False, path_type=Path),
    default=_default_folder,
    show_default="~/.cache/unbroken/run",
    help="Folder for cluster.json, which lists the pids and addresses of all processes while the cluster is up.",
)
@env_option(
    "--certs",
    "DYN_UP_CERTS",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    help="Folder of `unbroken certs`: clients are served over TLS, and so are all processes among themselves.",
)
@env_option("--no-restart", "DYN_UP_NO_RESTART", is_flag=True, help="Do not restart a process that exits.")
@click.option(
    "--ready-timeout",
    "ready_timeout_s",
    envvar="DYN_UP_READY_TIMEOUT",
    show_envvar=True,
    type=Number(0, DAY_S, above=True),
    help=f"Seconds within which a process must be ready. Default: {READY_TIMEOUT_S:g}; with trtllm, which loads for"
    f" minutes, {LOADING_TIMEOUT_S:g}.",
)
@logging_options
@click.argument("worker_options", nargs=-1, type=click.UNPROCESSED, metavar="[-- WORKER OPTIONS...]")
def command(
    *, state_dir: Path, no_restart: bool, ready_timeout_s: float | None, log_level: str, log_format: str, **given: Any
) -> None:
    """Run a registry, workers and frontends on this machine until Ctrl-C; restart any that exits.

    Options after -- are passed to every worker: see `unbroken worker --help`. Frontends read theirs from the DYN_
    variables in `unbroken frontend --help`.
    """
    config = ClusterConfig(log_level=log_level, log_format=log_format, **given)
    drain_timeout_s, is_tls = _check_children(config)
    config = replace(config, is_tls=is_tls)
    start_logging("up", {"log_level": log_level, "log_format": log_format})
    children = ChildConfig(
        is_restarted=not no_restart,
        ready_timeout_s=ready_timeout_s or (LOADING_TIMEOUT_S if config.engine == "trtllm" else READY_TIMEOUT_S),
        drain_timeout_s=drain_timeout_s,
    )
    run_process(Cluster(config, children, state_dir).run)


def _check_children(config: ClusterConfig) -> tuple[float, bool]:
    """Parse and check the options of workers and frontends before any process is started.

    Returns how many seconds streams may continue after Ctrl-C, and whether frontends speak TLS, as set by options and
    environment. Raises the error with which each child would otherwise exit.
    """
    registry, no_file = "127.0.0.1:0", Path(os.devnull)
    of_worker = _parse("worker", worker.command, worker_command(config, no_file, registry=registry))
    of_frontend = _parse("frontend", frontend.command, frontend_command(config, 0, no_file, {}, registry=registry))
    worker.check_options(of_worker)
    frontend.check_options(of_frontend)
    for name in ("admin_listen", "admin_grpc_listen"):
        if config.frontends > 1 and of_frontend[name] and not of_frontend[name].endswith(":0"):
            raise click.UsageError(f"{of_frontend[name]} would be the admin address of every frontend: set port 0")
    return float(max(of_worker["drain_timeout"], of_frontend["drain_timeout"])), of_frontend["tls_cert"] is not None


def _parse(name: str, command: click.Command, line: Sequence[str]) -> dict[str, Any]:
    """The parameters of a child with this command line."""
    with command.make_context(f"unbroken {name}", [*line[len(PROGRAM) + 1 :]]) as context:
        return context.params
