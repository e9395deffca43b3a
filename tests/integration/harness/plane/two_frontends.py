"""Two frontends that know the same workers: what a worker admits is then its own doing."""

from dataclasses import dataclass
from itertools import count

from tests.integration.harness.metrics import read_metrics
from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.plane.processes import Frontend, Process
from tests.integration.harness.waiting import until

LIMITS = [(1, 0), (1, 1), (2, 2), (3, 0), (2, 5), (5, 3)]
"""Of slots and of places that are tried."""
REFUSALS = ("WORKER_AT_CAPACITY", "OVERLOADED")
NAMES = count()


@dataclass
class TwoFrontends:
    """See the module."""

    plane: Plane
    other: Frontend

    @classmethod
    def of(cls, plane: Plane) -> "TwoFrontends":
        """The plane's own and another."""
        return cls(plane, plane.start_frontend())

    @property
    def frontends(self) -> tuple[Frontend, Frontend]:
        return (self.plane.frontend, self.other)

    async def worker(self, slots: int, places: int, *options: str) -> tuple[Process, str]:
        """A worker that both have found, and the name of its model, which no other worker serves."""
        model = f"mocker-{next(NAMES)}"
        limits = (f"--engine-request-limit={slots}", f"--request-queue-limit={places}")
        worker = await self.plane.worker(f"--served-model-name={model}", "--mocker-itl-ms=5", *limits, *options)
        await until(lambda: self.other.has_found(worker))
        return worker, model

    async def counted(self, model: str) -> tuple[float, float]:
        """Requests for the model, and those of them that were rejected, as both frontends count them."""
        metrics_read = [await read_metrics(frontend) for frontend in self.frontends]
        asked = sum(one.sum("dynamo_frontend_requests_total", model=model) for one in metrics_read)
        return asked, sum(one.sum("dynamo_frontend_model_rejection_total", model=model) for one in metrics_read)
