"""Finds a worker for a call, or says why there is none. Admission and routing ask the same balancer.

A request reads the current states of a few workers, and relies on earlier looks beside:

| what | is reused |
| --- | --- |
| that a worker is closed to every request | until it changes |
| that one of many workers is busy | for `BUSY_S` after the first was found busy, while the thresholds stay |
| the rejection of requests with the same needs | for `REJECTION_S`, while no worker comes or goes |

Whether a request is rejected is always decided anew. Only what the rejection says may be a little old.
"""

import random
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from services.core.call import Call
from services.core.errors import Failure
from services.frontend.routing.candidate import Candidate
from services.frontend.routing.policy import LOOKS_MAX, Survey, choose, healthy, less_loaded, survey
from services.frontend.routing.rejection import Rejections, rejection_of
from services.frontend.routing.state import LEFT_OUT, MOVED_REQUEST, NEW_REQUEST, Needs, State
from services.frontend.routing.thresholds import BusyThresholds
from services.frontend.routing.worker_set import WorkerSet
from services.runtime.loop import clock

BUSY_S = 0.05
"""A fifth of the time between two load reports."""
REJECTION_S = 0.25
"""The time between two load reports of a worker: the facts behind a rejection are as old anyway."""
REJECTIONS_MAX = 64
"""How many rejections are kept for reuse, each for a model and needs."""


class Balancer:
    """Looks at a few workers, drawn at random; at all open ones only if none of these is healthy."""

    def __init__(
        self,
        thresholds: BusyThresholds,
        rng: random.Random,
        registered_count: Callable[[str], int] = lambda model: 0,
    ) -> None:
        """`registered_count`: how many workers are registered for a model, connected or not."""
        self._registered_count = registered_count
        self.rejections = Rejections(rng)
        self._thresholds = thresholds
        self._rng = rng
        # (model, needs) → rejection, version of the worker set, and until when it may be reused
        self._kept: dict[tuple[str, Needs], tuple[Failure, int, float]] = {}

    def needs(self, model: str, call: Call, count: int = 1, tokens: int = 0) -> Needs:
        """What the call needs, with the thresholds as they are now. `count`, `tokens`: see `Needs`."""
        return Needs(call.excluded, self._thresholds.acting(model), count, tokens, call.tenant)

    def require_room(self, workers: WorkerSet, needs: Needs) -> None:
        """Raise the rejection of a new request, if `choose` would raise it."""
        now = clock()
        workers.expire_busy(needs.thresholds, now)
        if not workers.open:  # Under overload, none is.
            raise self._rejection(workers, needs)
        if next(healthy(workers.open, needs, now, self._rng), None) is not None:
            return
        if not self._look_at_all_open(workers, needs, now).eligible(NEW_REQUEST):
            raise self._rejection(workers, needs)

    def choose(self, workers: WorkerSet, needs: Needs) -> Candidate:
        """Choose a worker for a new request. Raises the rejection of the request if no worker is eligible."""
        if (found := self._find(workers, needs, NEW_REQUEST, clock())) is None:
            raise self._rejection(workers, needs)
        return found

    def choose_other(self, workers: WorkerSet, needs: Needs) -> Candidate | None:
        """Choose a worker for a request that lost its own; None if no worker is eligible. It may be a busy one."""
        now = clock()
        found = self._find(workers, needs, MOVED_REQUEST, now)
        if found is None and workers.busy:
            found = self._find_among_busy(workers, replace(needs, thresholds=None), now)
        return found

    def _find(self, workers: WorkerSet, needs: Needs, order: Sequence[State], now: float) -> Candidate | None:
        workers.expire_busy(needs.thresholds, now)
        found = less_loaded(healthy(workers.open, needs, now, self._rng))
        if found is None:
            found = choose(self._look_at_all_open(workers, needs, now).eligible(order), self._rng)
        return found

    def _find_among_busy(self, workers: WorkerSet, needs: Needs, now: float) -> Candidate | None:
        if (found := less_loaded(healthy(workers.busy, needs, now, self._rng))) is not None:
            return found
        return choose(_look_at_all(workers, workers.busy, needs, now).eligible(MOVED_REQUEST), self._rng)

    def _look_at_all_open(self, workers: WorkerSet, needs: Needs, now: float) -> Survey:
        found = _look_at_all(workers, workers.open, needs, now)
        if needs.thresholds is not None and len(workers) > LOOKS_MAX:
            workers.set_busy(found.busy, needs.thresholds, until=now + BUSY_S)
        return found

    def _rejection(self, workers: WorkerSet, needs: Needs) -> Failure:
        """The rejection of a new request that no worker is eligible for."""
        now = clock()
        if needs.excluded and len(workers) <= LOOKS_MAX:
            return self.rejections.jittered(self._judged(workers, needs, now))
        if needs.excluded:
            needs = replace(needs, excluded=frozenset())  # So that requests refused by different workers share one.
        key = (workers.card.model, needs)
        rejection, version, until = self._kept.get(key, (None, 0, 0.0))
        if rejection is None or version != workers.version or now >= until:
            rejection = self._judged(workers, needs, now)
            self._keep(key, (rejection, workers.version, now + REJECTION_S))
        return self.rejections.jittered(rejection)

    def _judged(self, workers: WorkerSet, needs: Needs, now: float) -> Failure:
        model = workers.card.model
        return rejection_of(survey(workers, needs, now), model, self._registered_count(model))

    def _keep(self, key: tuple[str, Needs], entry: tuple[Failure, int, float]) -> None:
        if len(self._kept) >= REJECTIONS_MAX:
            self._kept.clear()
        self._kept[key] = entry


def _look_at_all(workers: WorkerSet, candidates: Sequence[Candidate], needs: Needs, now: float) -> Survey:
    """Sort the candidates by state, and leave out of the worker set those that are closed to every request."""
    found = survey(candidates, needs, now)
    for state in LEFT_OUT:
        for one in found.by_state[state]:
            if one.is_closed:
                workers.leave_out(one)
    return found
