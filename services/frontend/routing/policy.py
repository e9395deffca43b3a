"""Which candidate a call goes to: pure functions over the states of workers."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.core.model_card import ModelCard
from services.frontend.routing.candidate import Candidate
from services.frontend.routing.state import Needs, State
from services.frontend.routing.worker_set import WorkerSet

LOOKS_MAX = 8
"""How many workers a request looks at, one by one, before it looks at all of them."""


class Workers(Protocol):
    """The workers that this frontend has sessions with: see `Pool`."""

    def worker_set(self, card: ModelCard) -> WorkerSet: ...

    def candidate(self, key: str) -> Candidate | None: ...

    def quarantine(self, worker: Candidate) -> None: ...


@dataclass(frozen=True, slots=True)
class Survey:
    """The workers of a model by their state for one call."""

    needs: Needs
    by_state: dict[State, list[Candidate]]

    @property
    def busy(self) -> Sequence[Candidate]:
        return self.by_state[State.BUSY]

    @property
    def present(self) -> list[Candidate]:
        """All that are not gone."""
        return [one for state, some in self.by_state.items() if state is not State.GONE for one in some]

    @property
    def is_crowded(self) -> bool:
        """Whether some workers are full or busy."""
        return bool(self.by_state[State.FULL] or self.busy)

    def eligible(self, order: Sequence[State]) -> Sequence[Candidate]:
        """The workers in the first of these states that any worker is in: `NEW_REQUEST` or `MOVED_REQUEST`."""
        return next((found for state in order if (found := self.by_state[state])), ())


def survey(candidates: Iterable[Candidate], needs: Needs, now: float) -> Survey:
    """Sort the candidates by state. `now`: in event-loop time."""
    by_state: dict[State, list[Candidate]] = {state: [] for state in State}
    for one in candidates:
        by_state[one.state(needs, now)].append(one)
    return Survey(needs, by_state)


def healthy(candidates: Sequence[Candidate], needs: Needs, now: float, rng: random.Random) -> Iterator[Candidate]:
    """The healthy candidates, in random order. Looks at `LOOKS_MAX` at most."""
    for one in _drawn(candidates, rng):
        if one.state(needs, now) is State.HEALTHY:
            yield one


def choose(candidates: Sequence[Candidate], rng: random.Random) -> Candidate | None:
    """The less loaded of two drawn at random; None if there are no candidates."""
    return less_loaded(_drawn(candidates, rng))


def less_loaded(candidates: Iterator[Candidate]) -> Candidate | None:
    """The one of the first two with fewer of our requests; of equals, one whose load is known. None if there are none.

    On candidates in random order this is the "power of two choices": near the best, without a herd on the best.
    Source: M. Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing" (2001).
    """
    first, second = next(candidates, None), next(candidates, None)
    if first is None or second is None:
        return first
    more = first.in_flight_count - second.in_flight_count
    if more == 0:
        return first if first.ranks() or not second.ranks() else second
    return first if more < 0 else second


def _drawn(candidates: Sequence[Candidate], rng: random.Random) -> Iterator[Candidate]:
    """The candidates in random order, each once; `LOOKS_MAX` at most."""
    if len(candidates) > LOOKS_MAX:
        drawn: set[int] = set()
        for _ in range(LOOKS_MAX):
            position = int(rng.random() * len(candidates))
            if position not in drawn:
                drawn.add(position)
                yield candidates[position]
        return
    rest = list(candidates)
    while len(rest) > 1:
        position = int(rng.random() * len(rest))
        rest[position], rest[-1] = rest[-1], rest[position]
        yield rest.pop()
    yield from rest
