"""Finds a worker for a call, and says why where there is none: the one way in which admission and routing look for it.

Few workers are all seen anew for each request. Of many, what was seen a moment ago is believed:

| what | is believed |
| --- | --- |
| that a worker has no room for a single request, or leaves | until there is news of it |
| that it is busy | for `BUSY_S` since the first was found to be, while the thresholds stay |
| how full all of them are, for what a refusal tells | for `TOLD_S`, while no worker comes or goes |
"""

import random
from collections.abc import Sequence
from typing import Generic

from msgspec.structs import replace

from services.core.call import Call
from services.core.errors import Failure
from services.frontend.routing.policy import LOOKS_MAX, AnyWorker, Needs, View, choose, healthy, less_loaded, view
from services.frontend.routing.rejection import jittered, refusal
from services.frontend.routing.thresholds import BusyThresholds
from services.frontend.routing.worker_set import WorkerSet
from services.runtime.loop import clock

BUSY_S = 0.05
"""A fifth of the time between two reports."""
TOLD_S = 0.25
"""What a worker says of itself is as old, too."""
TOLD_MAX = 64
"""Kinds of requests whose refusal is remembered."""


class Balancer(Generic[AnyWorker]):
    """A few workers are looked at, at random; all that are open only where none of these is healthy."""

    def __init__(self, busy: BusyThresholds, rng: random.Random) -> None:
        self._busy = busy
        self._rng = rng
        self._told: dict[tuple[str, Needs], tuple[Failure, int, float]] = {}  # With `changes_count`, and until when.

    def needs(self, model: str, call: Call, count: int = 1, tokens: int = 0) -> Needs:
        """By the thresholds as they are now."""
        return Needs(call.excluded, self._busy.acting(model), count, tokens)

    def has_any(self, worker_set: WorkerSet[AnyWorker], needs: Needs) -> bool:
        """Whether `find` would find one for a new request."""
        now = clock()
        worker_set.doubt_busy(needs.thresholds, now)
        if next(healthy(worker_set.open, needs, now, self._rng), None) is not None:
            return True
        return self._find_among_all(worker_set, needs, now, is_under_way=False) is not None

    def find(self, worker_set: WorkerSet[AnyWorker], needs: Needs, *, is_under_way: bool = False) -> AnyWorker | None:
        """An eligible worker: the less loaded of two healthy ones, if there are."""
        now = clock()
        worker_set.doubt_busy(needs.thresholds, now)
        found = less_loaded(healthy(worker_set.open, needs, now, self._rng))
        if found is None:
            found = self._find_among_all(worker_set, needs, now, is_under_way=is_under_way)
        if found is None and is_under_way and worker_set.busy:
            found = self._find_busy(worker_set, replace(needs, thresholds=None), now)
        return found

    def _find_among_all(
        self, worker_set: WorkerSet[AnyWorker], needs: Needs, now: float, *, is_under_way: bool
    ) -> AnyWorker | None:
        seen = _sorted(worker_set, worker_set.open, needs, now)
        if needs.thresholds is not None and len(worker_set) > LOOKS_MAX:
            worker_set.believe_busy(seen.busy, needs.thresholds, until=now + BUSY_S)
        return choose(seen.eligible(is_under_way=is_under_way), self._rng)

    def _find_busy(self, worker_set: WorkerSet[AnyWorker], needs: Needs, now: float) -> AnyWorker | None:
        """One of those that are believed to be."""
        if (found := less_loaded(healthy(worker_set.busy, needs, now, self._rng))) is not None:
            return found
        return choose(_sorted(worker_set, worker_set.busy, needs, now).eligible(is_under_way=True), self._rng)

    def refusal(self, worker_set: WorkerSet[AnyWorker], needs: Needs, model: str) -> Failure:
        """Why there is none for a new request."""
        now = clock()
        if len(worker_set) <= LOOKS_MAX:
            return jittered(refusal(view(worker_set, needs, now), model), self._rng)
        needs = replace(needs, excluded=frozenset())  # Or each way that a request has come would be a kind of its own.
        key = (model, needs)
        told, changes_count, until = self._told.get(key, (None, 0, 0.0))
        if told is None or changes_count != worker_set.changes_count or now >= until:
            told = refusal(view(worker_set, needs, now), model)
            self._remember(key, (told, worker_set.changes_count, now + TOLD_S))
        return jittered(told, self._rng)

    def _remember(self, key: tuple[str, Needs], told: tuple[Failure, int, float]) -> None:
        if len(self._told) >= TOLD_MAX:
            self._told.clear()
        self._told[key] = told


def _sorted(
    worker_set: WorkerSet[AnyWorker], sessions: Sequence[AnyWorker], needs: Needs, now: float
) -> View[AnyWorker]:
    """How they stand; those without room for anybody are closed."""
    seen = view(sessions, needs, now)
    for one in seen.closed():
        worker_set.close(one)
    return seen
