"""Finds a worker for a call: the one way in which admission and routing look for it."""

import asyncio
import random
from typing import Generic

from services.errors import Failure
from services.frontend.busy import BusyThresholds
from services.frontend.eligible import AnyWorker, Needs, choose, healthy, less_loaded, refusal, view
from services.frontend.roster import Roster
from services.request import Call


class Search(Generic[AnyWorker]):
    """A few workers are looked at, at random; all that are open only where none of these is healthy."""

    def __init__(self, busy: BusyThresholds, rng: random.Random) -> None:
        self._busy = busy
        self._rng = rng

    def needs(self, model: str, call: Call, count: int = 1, tokens: int = 0) -> Needs:
        """By the thresholds as they are now."""
        return Needs(call.excluded, self._busy.acting(model), count, tokens)

    def find(self, roster: Roster[AnyWorker], needs: Needs, *, is_under_way: bool = False) -> AnyWorker | None:
        """An eligible worker: the less loaded of two healthy ones, if there are."""
        now = asyncio.get_running_loop().time()
        found = less_loaded(healthy(roster.open, needs, now, self._rng))
        return self._find_among_all(roster, needs, now, is_under_way=is_under_way) if found is None else found

    def _find_among_all(
        self, roster: Roster[AnyWorker], needs: Needs, now: float, *, is_under_way: bool
    ) -> AnyWorker | None:
        seen = view(roster.open, needs, now)
        for one in seen.closed():
            roster.set_aside(one)
        return choose(seen.eligible(is_under_way=is_under_way), self._rng)

    def refusal(self, roster: Roster[AnyWorker], needs: Needs, model: str) -> Failure:
        """Why there is none for a new request."""
        return refusal(view(roster, needs, asyncio.get_running_loop().time()), model, self._rng)
