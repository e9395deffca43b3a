"""Refuses what no worker has room for before any work is done on it."""

import random
from typing import Generic

from services.core.call import Call
from services.core.interface import Finish, Layer, Sink
from services.core.request import Request
from services.frontend.model_catalog import Catalogue
from services.frontend.routing.balancer import Search
from services.frontend.routing.policy import AnyWorker, Workers
from services.frontend.routing.rejection import jittered, no_workers, of_registered
from services.frontend.routing.thresholds import BusyThresholds


class Admit(Generic[AnyWorker]):
    """Above the deadline and preprocess: a refusal costs neither a timer nor a tokeniser.

    By the same rules as route, which asks again: while a prompt was tokenised, others may have taken the room.
    """

    def __init__(
        self, inner: Layer, catalogue: Catalogue, pool: Workers[AnyWorker], busy: BusyThresholds, rng: random.Random
    ) -> None:
        self._inner = inner
        self._catalogue = catalogue
        self._pool = pool
        self._rng = rng
        self._search: Search[AnyWorker] = Search(busy, rng)

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        if self._catalogue.knows(request.model):
            self._check(request, call)
        elif count := self._catalogue.registered_count(request.model):  # Else preprocess says that it does not exist.
            detail = f"no worker of {request.model!r} is reached so far, {of_registered(count)}"
            raise jittered(no_workers(detail), self._rng)
        return await self._inner(request, call, sink)

    def _check(self, request: Request, call: Call) -> None:
        """Raises OVERLOADED, NO_WORKERS, or INVALID_ARGUMENT for more choices than any worker takes."""
        roster = self._pool.roster(self._catalogue.find(request.model).card)
        needs = self._search.needs(request.model, call, request.n)
        if not self._search.has_any(roster, needs):
            raise self._search.refusal(roster, needs, request.model)
