"""`unbroken frontend` with more than one process: the supervisor, and the command line of each process."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from services.cli.environment import start_logging
from services.runtime.process import run_process
from services.runtime.supervision.program import PROGRAM

LISTENS = {
    "--grpc-listen": "grpc_listen",
    "--http-listen": "http_listen",
    "--admin-listen": "admin_listen",
    "--admin-grpc-listen": "admin_grpc_listen",
}
"""The options that set listen addresses, with their parameter names."""


def supervise(given: Mapping[str, Any], warn: Callable[[], None]) -> None:
    """Supervise processes that get the same options as this process. `warn`: logs warnings about the options."""
    from services.frontend.processes.supervisor import Supervisor, SupervisorConfig

    config = SupervisorConfig(
        processes=given["processes"],
        listens={option: given[name] for option, name in LISTENS.items() if given[name] is not None},
        drain_timeout_s=given["drain_timeout"],
        metrics_prefix=given["metrics_prefix"],
        ready_file=given["ready_file"],
        command=process_command,
    )
    start_logging("frontend", given, config)
    warn()
    run_process(Supervisor(config).run)


def process_command(addresses: Mapping[str, str], member: Path, ready_file: Path) -> Sequence[str]:
    """The command line of one process: this process's own, followed by options that override it."""
    overrides = {**addresses, "--member": member, "--ready-file": ready_file}
    return [*PROGRAM, *sys.argv[1:], *(f"{option}={value}" for option, value in overrides.items())]
