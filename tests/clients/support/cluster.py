"""The plane of the client tests: two workers, and a third that is soon full."""

from dataclasses import dataclass

from tests.integration.harness.metrics import read_metrics
from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.plane.processes import Frontend, Process
from tests.integration.harness.waiting import until

MOCKERS = 2
MOCKER = ("--mocker-itl-ms=20",)
PATIENT = "--stall-ms=30000"
"""On a busy machine a worker may be silent for long without being lost. A killed worker closes its connections."""
FULL = ("--served-model-name=full", "--engine-request-limit=1", "--request-queue-limit=0", *MOCKER)


@dataclass
class Cluster:
    """A plane with MOCKERS workers once it is filled. `full`: the worker of the model `full`."""

    plane: Plane
    full: Process
    workers: list[Process]

    async def fill(self) -> None:
        """Replace workers that have died."""
        self.workers = [worker for worker in self.workers if worker.status() is None]
        while len(self.workers) < MOCKERS:
            self.workers.append(await self.plane.worker(*MOCKER))

    async def another_frontend(self, *options: str) -> Frontend:
        """Start another frontend and wait until it has found all workers."""
        await self.fill()
        frontend = self.plane.start_frontend(PATIENT, *options)
        await until(lambda: all(frontend.has_found(worker) for worker in [self.full, *self.workers]))
        return frontend

    async def generated(self) -> float:
        """How many tokens the workers have computed so far."""
        return sum([(await read_metrics(worker)).generated_tokens for worker in self.workers])

    async def kill_busy(self) -> None:
        """Kill the worker that runs a request, once only one does: cancelled requests may still be running."""
        worker: Process = await until(self._only_busy)
        worker.kill()

    async def _only_busy(self) -> Process | None:
        busy = [worker for worker in self.workers if (await read_metrics(worker)).running]
        return busy[0] if len(busy) == 1 else None
