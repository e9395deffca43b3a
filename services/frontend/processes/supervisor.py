"""Runs one frontend as several processes that share its ports; the kernel gives each connection to one of them.

Start: reserve the ports → start all processes → report ready once all are ready. A process that exits is restarted, and
its counters are kept. Stop (SIGTERM): all processes drain at the same time; one that does not exit in time is killed.
"""

import asyncio
import json
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import structlog

from services.frontend.processes.ipc import SUPERVISOR_SOCKET, control_app, serve_control
from services.frontend.processes.process_group import ProcessGroup
from services.frontend.processes.socket_dir import private_folder
from services.runtime.listen import cannot_listen, reserve
from services.runtime.process import StartupError, write_atomically
from services.runtime.supervision.child import Child, ChildConfig
from services.runtime.supervision.children import start_all, start_until, stop_all

log = structlog.get_logger()

SOCKET_PATH_BYTES_MAX = 107
"""Source: unix(7)."""
NAME_BYTES_MARGIN = 16
"""How much longer the name of a process's socket may be than the supervisor's."""

Command = Callable[[Mapping[str, str], Path, Path], Sequence[str]]
"""Returns the command line of a process. Parameters: addresses by option, the value of `--member`, the ready file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorConfig:
    """How to run the processes.

    processes: their number.
    listens: listen addresses by option. Port 0: one free port, the same for all processes.
    drain_timeout_s: how long streams may continue after SIGTERM.
    ready_file: written with the real addresses when all processes are ready.
    """

    processes: int
    listens: Mapping[str, str]
    drain_timeout_s: float = 30.0
    metrics_prefix: str = "dynamo_frontend"
    ready_file: Path | None = None
    command: Command = field(repr=False)


class _Log:
    """Writes events of the child processes to the log. The children inherit stderr and write their own lines."""

    def line(self, name: str, text: str) -> None:
        raise AssertionError("no output is relayed")

    def note(self, name: str, text: str) -> None:
        log.info("frontend process", name=name, what=text)

    def warn(self, name: str, text: str) -> None:
        log.warning("frontend process", name=name, what=text)


class Supervisor:
    """Starts, supervises and stops the processes of one frontend."""

    def __init__(self, config: SupervisorConfig) -> None:
        self._config = config

    async def run(self, stopping: asyncio.Event) -> None:
        """Run until `stopping` is set and all processes have drained and exited.

        Raises StartupError if the frontend cannot start.
        """
        processes = ProcessGroup(self._config.metrics_prefix)
        app = control_app(processes, processes.join)
        with ExitStack() as held:
            addresses = self._reserve(held)
            folder = held.enter_context(private_folder())
            children = self._children(folder, addresses)
            async with serve_control(app, _socket_in(folder)), asyncio.TaskGroup() as group:
                try:
                    await start_until(stopping, self._start(children, group))
                finally:
                    await stop_all(children)
        log.info("frontend stopped")

    def _reserve(self, held: ExitStack) -> Mapping[str, str]:
        """Reserve the ports until `held` closes. Returns the real addresses. Raises StartupError."""
        addresses = {}
        for option, listen in self._config.listens.items():
            try:
                addresses[option], holders = reserve(listen)
            except OSError as error:
                raise cannot_listen("gRPC" if "grpc" in option else "HTTP", listen, error, option=option) from error
            for holder in holders:
                held.enter_context(holder)
        return addresses

    def _children(self, folder: Path, addresses: Mapping[str, str]) -> Sequence[Child]:
        config = ChildConfig(drain_timeout_s=self._config.drain_timeout_s, is_relayed=False)

        def child(name: str) -> Child:
            command = partial(self._config.command, addresses, folder / name)
            return Child(
                name,
                lambda ready_file, _: command(ready_file),
                config,
                console=_Log(),
                folder=folder,
                on_change=lambda: None,
                rng=random.Random(),
            )

        return [child(f"frontend-{number}") for number in range(1, self._config.processes + 1)]

    async def _start(self, children: Sequence[Child], group: asyncio.TaskGroup) -> None:
        await start_all(children, group)
        addresses = children[0].last_ready  # All processes have the same addresses.
        log.info("frontend ready", processes=len(children), **addresses)
        if self._config.ready_file is not None:
            write_atomically(self._config.ready_file, json.dumps(addresses))


def _socket_in(folder: Path) -> Path:
    """The path of the supervisor's socket. Raises StartupError if the folder's path is too long for sockets."""
    path = folder / SUPERVISOR_SOCKET
    if len(str(path)) + NAME_BYTES_MARGIN > SOCKET_PATH_BYTES_MAX:
        raise StartupError(f"the path {folder} is too long for Unix sockets: set TMPDIR to a shorter path")
    return path
