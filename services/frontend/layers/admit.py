"""Refuses what no worker has room for before any work is done on it."""

import random
from typing import Generic

from services.core.call import Call
from services.core.interface import Finish, Layer, Sink
from services.core.request import Request
from services.frontend.model_catalog import ModelCatalog
from services.frontend.routing.balancer import Balancer
from services.frontend.routing.policy import AnyWorker, Workers
from services.frontend.routing.rejection import jittered, no_workers, of_registered
from services.frontend.routing.thresholds import BusyThresholds


class Admit(Generic[AnyWorker]):
    """Above the deadline and preprocess: a refusal costs neither a timer nor a tokeniser.

    By the same rules as route, which asks again: while a prompt was tokenised, others may have taken the room.
    """

    def __init__(
        self, inner: Layer, catalog: ModelCatalog, pool: Workers[AnyWorker], busy: BusyThresholds, rng: random.Random
    ) -> None:
        self._inner = inner
        self._catalog = catalog
        self._pool = pool
        self._rng = rng
        self._balancer: Balancer[AnyWorker] = Balancer(busy, rng)

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        if self._catalog.knows(request.model):
            self._check(request, call)
        elif count := self._catalog.registered_count(request.model):  # Else preprocess says that it does not exist.
            detail = f"no worker of {request.model!r} is reached so far, {of_registered(count)}"
            raise jittered(no_workers(detail), self._rng)
        return await self._inner(request, call, sink)

    def _check(self, request: Request, call: Call) -> None:
        """Raises OVERLOADED, NO_WORKERS, or INVALID_ARGUMENT for more choices than any worker takes."""
        worker_set = self._pool.worker_set(self._catalog.find(request.model).card)
        needs = self._balancer.needs(request.model, call, request.n)
        if not self._balancer.has_any(worker_set, needs):
            raise self._balancer.refusal(worker_set, needs, request.model)
