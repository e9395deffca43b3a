"""A request plane of real processes: a registry, a frontend, and the workers that a test starts."""

from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from tests.integration.harness.plane.engines import Engine, Mocker
from tests.integration.harness.plane.fork_server import ForkServer
from tests.integration.harness.plane.processes import NO_VARIABLES, Frontend, Process
from tests.integration.harness.waiting import until, wait_until


class Plane:
    """One registry, one frontend, any workers."""

    def __init__(
        self,
        nursery: ForkServer,
        folder: Path,
        *,
        frontend: tuple[str, ...] = (),
        registry: tuple[str, ...] = (),
        engine: Engine | None = None,
    ) -> None:
        """engine: of its workers; the mocker unless another is given."""
        self.engine: Engine = engine or Mocker()
        self._nursery = nursery
        self._folder = folder
        self._names = count()
        self._registry_options = registry
        self._processes: list[Process] = []
        self.registry = self._start(Process, "registry", "registry", "--listen=127.0.0.1:0", *registry)
        self.registry.wait_ready()
        self.registry_address: str = self.registry.ready["address"]
        self.frontend = self.start_frontend(*frontend)

    def start_frontend(self, *options: str) -> Frontend:
        """A frontend that listens. The plane has one of its own."""
        listen = ("--grpc-listen=127.0.0.1:0", "--http-listen=127.0.0.1:0", f"--registry={self.registry_address}")
        frontend: Frontend = self._start(Frontend, "frontend", "frontend", *listen, *options)
        frontend.wait_ready()
        return frontend

    def _start(self, kind: Any, name: str, *arguments: str, nursery: ForkServer | None = None, **more: Any) -> Any:
        process = kind(nursery or self._nursery, self._folder, f"{name}-{next(self._names)}", *arguments, **more)
        self._processes.append(process)
        return process

    def restart_registry(self) -> None:
        """Another registry where the first one was."""
        listen = f"--listen={self.registry_address}"
        self.registry = self._start(Process, "registry", "registry", listen, *self._registry_options)

    def launch(
        self, *options: str, nursery: ForkServer | None = None, environment: Mapping[str, str] = NO_VARIABLES
    ) -> Process:
        """Start a worker and don't wait for it. Its model is `mocker` unless the options say otherwise.

        environment: what its process has besides what the options come to: see engines.py.
        """
        listen = ("--listen=127.0.0.1:0", "--metrics-port=0", f"--registry={self.registry_address}")
        words = (*listen, *self.engine.words(options))
        given = {**self.engine.environment(options), **environment}
        worker: Process = self._start(Process, "worker", "worker", *words, nursery=nursery, environment=given)
        return worker

    async def worker(self, *options: str, environment: Mapping[str, str] = NO_VARIABLES) -> Process:
        """A worker that the frontend has found."""
        return await self.found(self.launch(*options, environment=environment))

    async def found(self, worker: Process) -> Process:
        """The worker, once the frontend has found it."""
        await until(lambda: worker.is_ready and self.frontend.has_found(worker))
        return worker

    @property
    def processes(self) -> list[Process]:
        """All that were started, the dead as well."""
        return list(self._processes)

    async def run(self, command: str, *arguments: str) -> int:
        """The exit status of a command of `unbroken` that ends by itself."""
        log = self._folder / f"{command}-{next(self._names)}.log"
        words = [command, f"--registry={self.registry_address}", *arguments]
        pid = self._nursery.order(start=words, log=str(log))
        status: list[int | None] = [None]

        def has_ended() -> bool:
            status[0] = self._nursery.order(poll=pid)
            return status[0] is not None

        await until(has_ended)
        assert status[0] is not None
        return status[0]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        wait_until(lambda: all(process.status() is not None for process in self._processes))
