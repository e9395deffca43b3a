"""Two frontends with the same workers, so that only the worker can enforce its limits."""

from dataclasses import dataclass
from itertools import count

from tests.integration.harness.metrics import read_metrics
from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.plane.processes import Frontend, Process
from tests.integration.harness.waiting import until

LIMITS = [(1, 0), (1, 1), (2, 2), (3, 0), (2, 5), (5, 3)]
"""Pairs of slots and queue places to test."""
REFUSALS = ("WORKER_AT_CAPACITY", "OVERLOADED")
NAMES = count()


@dataclass
class TwoFrontends:
    """A plane's own frontend and a second one."""

    plane: Plane
    other: Frontend

    @classmethod
    def of(cls, plane: Plane) -> "TwoFrontends":
        """Start a second frontend in the plane."""
        return cls(plane, plane.start_frontend())

    @property
    def frontends(self) -> tuple[Frontend, Frontend]:
        return (self.plane.frontend, self.other)

    async def worker(self, slots: int, places: int, *options: str) -> tuple[Process, str]:
        """Start a worker that both frontends find; return it and its model, which no other worker serves."""
        model = f"mocker-{next(NAMES)}"
        limits = (f"--engine-request-limit={slots}", f"--request-queue-limit={places}")
        worker = await self.plane.worker(f"--served-model-name={model}", "--mocker-itl-ms=5", *limits, *options)
        await until(lambda: self.other.has_found(worker))
        return worker, model

    async def request_and_rejection_counts(self, model: str) -> tuple[float, float]:
        """Return how many requests for the model both frontends counted, and how many of those were rejected."""
        metrics = [await read_metrics(frontend) for frontend in self.frontends]
        asked = sum(one.sum("dynamo_frontend_requests_total", model=model) for one in metrics)
        return asked, sum(one.sum("dynamo_frontend_model_rejection_total", model=model) for one in metrics)
