"""`unbroken frontend` with more than one process: the part of the one that is started, and what it tells the others."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from services.cluster.commands import PROGRAM
from services.runtime.log import configure_logging, log_config
from services.runtime.process import run_process

LISTENS = {
    "--grpc-listen": "grpc_listen",
    "--http-listen": "http_listen",
    "--admin-listen": "admin_listen",
    "--admin-grpc-listen": "admin_grpc_listen",
}
"""The options that say where, and their parameters."""


def supervise(given: Mapping[str, Any], warn: Callable[[], None]) -> None:
    """Be the supervisor of processes that are given all options that were given here. warn: of what is odd in them."""
    from services.frontend.processes.supervisor import Supervisor, SupervisorConfig

    configure_logging("frontend", level=given["log_level"], log_format=given["log_format"])
    config = SupervisorConfig(
        processes=given["processes"],
        listens={option: given[name] for option, name in LISTENS.items() if given[name] is not None},
        drain_timeout_s=given["drain_timeout"],
        metrics_prefix=given["metrics_prefix"],
        ready_file=given["ready_file"],
        command=process_command,
    )
    log_config(config)
    warn()
    run_process(Supervisor(config).run)


def process_command(addresses: Mapping[str, str], member: Path, ready_file: Path) -> Sequence[str]:
    """The command line of one of them: this one's, and then what the supervisor has settled, which counts."""
    settled = {**addresses, "--member": member, "--ready-file": ready_file}
    return [*PROGRAM, *sys.argv[1:], *(f"{option}={value}" for option, value in settled.items())]
