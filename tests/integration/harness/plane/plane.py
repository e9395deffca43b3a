"""A request plane of real processes: a registry, a frontend, and the workers that a test starts."""

from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from services.access.key import FORM as KEY
from tests.integration.harness.plane.engines import Engine, Mocker
from tests.integration.harness.plane.fork_server import ForkServer
from tests.integration.harness.plane.processes import NO_VARIABLES, Frontend, Process
from tests.integration.harness.waiting import until, wait_until
from tests.support.clock import WAIT_S

DRAIN_LONG = f"--drain-timeout={2 * WAIT_S:g}"
"""Longer than tests wait: a process that only leaves when its time is over fails them."""
PATIENCE = ("--stall-ms=20000", "--engine-stall-ms=60000", "--replacement-wait=60", DRAIN_LONG)
WORKER_PATIENCE = ("--queue-timeout=600", DRAIN_LONG)
"""Limits that no process exceeds because the machine is busy. Tests of a limit set their own."""


class Plane:
    """One registry, one frontend, and any number of workers."""

    def __init__(
        self,
        fork_server: ForkServer,
        folder: Path,
        *,
        frontend: tuple[str, ...] = (),
        registry: tuple[str, ...] = (),
        engine: Engine | None = None,
        is_patient: bool = False,
    ) -> None:
        """`engine`: of the workers; the mocker by default. `is_patient`: frontends and workers have long limits of time
        unless their options set shorter ones.
        """
        self.engine: Engine = engine or Mocker()
        self._fork_server = fork_server
        self._folder = folder
        self._names = count()
        self._registry_options = registry
        self._patience = PATIENCE if is_patient else ()
        self._worker_patience = WORKER_PATIENCE if is_patient else ()
        self._processes: list[Process] = []
        self.registry = self._start(Process, "registry", "registry", "--listen=127.0.0.1:0", *registry)
        self.registry.wait_ready()
        self.registry_address: str = self.registry.ready["address"]
        self.frontend = self.start_frontend(*frontend)

    def start_frontend(self, *options: str) -> Frontend:
        """Start a frontend and wait until it listens. The plane already has one."""
        listen = ("--grpc-listen=127.0.0.1:0", "--http-listen=127.0.0.1:0", f"--registry={self.registry_address}")
        frontend: Frontend = self._start(Frontend, "frontend", "frontend", *listen, *self._patience, *options)
        frontend.wait_ready()
        return frontend

    def _start(self, kind: Any, name: str, *arguments: str, fork_server: ForkServer | None = None, **more: Any) -> Any:
        parent = fork_server or self._fork_server
        process = kind(parent, self._folder, f"{name}-{next(self._names)}", *arguments, **more)
        self._processes.append(process)
        return process

    def restart_registry(self) -> None:
        """Start another registry at the address of the first one."""
        listen = f"--listen={self.registry_address}"
        self.registry = self._start(Process, "registry", "registry", listen, *self._registry_options)

    def launch(
        self, *options: str, fork_server: ForkServer | None = None, environment: Mapping[str, str] = NO_VARIABLES
    ) -> Process:
        """Start a worker without waiting for it. Its model is `mocker` unless the options say otherwise.

        `environment`: variables of its process in addition to those that follow from the options; see engines.py.
        """
        listen = ("--listen=127.0.0.1:0", "--metrics-port=0", f"--registry={self.registry_address}")
        words = (*listen, *self._worker_patience, *self.engine.arguments(options))
        given = {**self.engine.environment(options), **environment}
        worker: Process = self._start(Process, "worker", "worker", *words, fork_server=fork_server, environment=given)
        return worker

    async def worker(self, *options: str, environment: Mapping[str, str] = NO_VARIABLES) -> Process:
        """Start a worker and wait until the frontend has found it."""
        return await self.found(self.launch(*options, environment=environment))

    async def found(self, worker: Process) -> Process:
        """Wait until the frontend has found the worker; return the worker."""
        await until(lambda: worker.is_ready and self.frontend.has_found(worker))
        return worker

    @property
    def processes(self) -> list[Process]:
        """All processes that were started, including those that have exited."""
        return list(self._processes)

    async def run(self, command: str, *arguments: str) -> int:
        """Run a command of `unbroken` to its end; return its exit status."""
        log = self._folder / f"{command}-{next(self._names)}.log"
        words = [command, f"--registry={self.registry_address}", *arguments]
        pid = self._fork_server.order(start=words, log=str(log))
        status: list[int | None] = [None]

        def has_ended() -> bool:
            status[0] = self._fork_server.order(poll=pid)
            return status[0] is not None

        await until(has_ended)
        assert status[0] is not None
        return status[0]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        wait_until(lambda: all(process.status() is not None for process in self._processes))
        told = [one.name for one in self._processes if one.log_file.is_file() and KEY.search(one.log_file.read_text())]
        assert told == [], "an API key is in the log"
