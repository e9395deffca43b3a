"""Keeps several processes that are one frontend: they share its ports, and the kernel gives each client to one of them.

Start: take the ports → start all → ready once all are. A process that dies is started again; what it had counted stays
counted. End (SIGTERM): all drain, side by side, as a single process does; who has not ended in time is killed.
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

from services.frontend.processes.ipc import SUPERVISOR_SOCKET, answering, control_app
from services.frontend.processes.process_group import ProcessGroup
from services.frontend.processes.socket_dir import private_folder
from services.runtime.listen import cannot_listen, reserve
from services.runtime.process import StartupError, write_atomically
from services.runtime.supervision.child import Child, ChildConfig, end_all, start_all, start_until

log = structlog.get_logger()

SOCKET_PATH_BYTES_MAX = 107
"""Source: unix(7)."""
ROOM_FOR_NAMES = 16
"""By how much the name of a process's socket may be longer."""

Command = Callable[[Mapping[str, str], Path, Path], Sequence[str]]
"""The command line of a process, given its addresses by their options, which member it is, and its ready file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorConfig:
    """processes: how many. listens: where, by the option that says so; port 0 is one free port for all.
    drain_timeout_s: how long streams may go on after SIGTERM. ready_file: written when all processes are ready.
    """

    processes: int
    listens: Mapping[str, str]
    drain_timeout_s: float = 30.0
    metrics_prefix: str = "dynamo_frontend"
    ready_file: Path | None = None
    command: Command = field(repr=False)


class _Log:
    """The console of members that write their lines themselves."""

    def line(self, name: str, text: str) -> None:
        raise AssertionError("nothing is relayed")

    def note(self, name: str, text: str) -> None:
        log.info("frontend process", name=name, what=text)

    def warn(self, name: str, text: str) -> None:
        log.warning("frontend process", name=name, what=text)


class Supervisor:
    """One frontend of several processes, from start to end."""

    def __init__(self, config: SupervisorConfig) -> None:
        self._config = config

    async def run(self, stopping: asyncio.Event) -> None:
        """Until `stopping` is set and all is drained. Raises StartupError when it can't start."""
        family = ProcessGroup(self._config.metrics_prefix)
        with ExitStack() as held:
            addresses = self._reserve(held)
            folder = held.enter_context(private_folder())
            members = self._members(folder, addresses)
            async with answering(control_app(family, family.join), _socket_in(folder)), asyncio.TaskGroup() as lives:
                try:
                    await start_until(stopping, self._start(members, lives))
                finally:
                    await end_all(members)
        log.info("frontend stopped")

    def _reserve(self, held: ExitStack) -> Mapping[str, str]:
        """Take the ports until `held` closes. Returns the real addresses. Raises StartupError."""
        addresses = {}
        for option, listen in self._config.listens.items():
            try:
                addresses[option], holders = reserve(listen)
            except OSError as error:
                raise cannot_listen("gRPC" if "grpc" in option else "HTTP", listen, error, option=option) from error
            for holder in holders:
                held.enter_context(holder)
        return addresses

    def _members(self, folder: Path, addresses: Mapping[str, str]) -> Sequence[Child]:
        config = ChildConfig(drain_timeout_s=self._config.drain_timeout_s, is_relayed=False)

        def member(name: str) -> Child:
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

        return [member(f"frontend-{number}") for number in range(1, self._config.processes + 1)]

    async def _start(self, members: Sequence[Child], lives: asyncio.TaskGroup) -> None:
        await start_all(members, lives)
        addresses = members[0].known  # Those of all.
        log.info("frontend ready", processes=len(members), **addresses)
        if self._config.ready_file is not None:
            write_atomically(self._config.ready_file, json.dumps(addresses))


def _socket_in(folder: Path) -> Path:
    """Raises StartupError for a folder that no socket can be in."""
    path = folder / SUPERVISOR_SOCKET
    if len(str(path)) + ROOM_FOR_NAMES > SOCKET_PATH_BYTES_MAX:
        raise StartupError(f"{folder} is too long a name for a folder with sockets: give another TMPDIR")
    return path
