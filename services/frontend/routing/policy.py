"""Which workers a call may go to, which of them it goes to, and what it is told where there is none: pure policy."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Generic, Protocol, TypeVar

from msgspec import Struct

from services.core.call import RoutedSession
from services.core.errors import RefusedFor
from services.core.model_card import ModelCard
from services.frontend.routing.load import Occupancy
from services.frontend.routing.thresholds import Rank, Thresholds, is_busy
from services.frontend.routing.worker_set import WorkerSet

LOOKS_MAX = 8
"""At so many workers a request looks one by one; only where none of them is healthy at all."""


class Worker(Protocol):
    """What routing knows of a session to a worker."""

    is_draining: bool
    quarantined_until: float

    @property
    def key(self) -> str: ...

    @property
    def session(self) -> RoutedSession: ...

    @property
    def is_lost(self) -> bool: ...

    @property
    def in_flight_count(self) -> int: ...

    @property
    def request_limit(self) -> int | None: ...

    @property
    def occupancy(self) -> Occupancy: ...

    def ranks(self) -> Sequence[Rank]: ...

    def is_full(self, count: int = 1, tokens: int = 0) -> bool: ...

    def on_refused(self, bound: RefusedFor, count: int, tokens: int) -> None: ...


AnyWorker = TypeVar("AnyWorker", bound=Worker)


class Workers(Protocol[AnyWorker]):
    """The sessions there are: see `Pool`."""

    def worker_set(self, card: ModelCard) -> WorkerSet[AnyWorker]: ...

    def candidate(self, key: str) -> AnyWorker | None: ...

    def quarantine(self, worker: AnyWorker) -> None: ...


class Standing(Enum):
    """How a worker stands towards one call.

    GONE: lost, or leaving. FULL: without room for so many choices. EXCLUDED: has room, but the call has been there.
    BUSY: has room, and is over one of the thresholds. QUARANTINED, HEALTHY: have room and are not busy.
    """

    GONE = auto()
    FULL = auto()
    EXCLUDED = auto()
    BUSY = auto()
    QUARANTINED = auto()
    HEALTHY = auto()


class Needs(Struct, frozen=True, gc=False):
    """What a call asks of a worker. excluded: where it has been. thresholds: None where nobody counts as busy.

    count: for how many choices at once there must be room. tokens: of their prompts together; 0: look only at requests,
    for the worker itself is to say whether so many tokens may wait.
    """

    excluded: frozenset[str] = frozenset()
    thresholds: Thresholds | None = None
    count: int = 1
    tokens: int = 0


def standing(one: Worker, needs: Needs, now: float) -> Standing:
    """Of one worker, for one call. now: in loop time."""
    if one.is_draining or one.is_lost:
        return Standing.GONE
    if one.is_full(needs.count, needs.tokens):
        return Standing.FULL
    if one.key in needs.excluded:
        return Standing.EXCLUDED
    if needs.thresholds is not None and is_busy(one.ranks(), needs.thresholds):
        return Standing.BUSY
    return Standing.HEALTHY if one.quarantined_until <= now else Standing.QUARANTINED


@dataclass(frozen=True, slots=True)
class View(Generic[AnyWorker]):
    """How the workers of a model stand towards one call."""

    needs: Needs
    by_standing: dict[Standing, list[AnyWorker]]

    @property
    def healthy(self) -> Sequence[AnyWorker]:
        return self.by_standing[Standing.HEALTHY]

    @property
    def busy(self) -> Sequence[AnyWorker]:
        return self.by_standing[Standing.BUSY]

    @property
    def present(self) -> list[AnyWorker]:
        """Those that do not leave."""
        return [one for standing, some in self.by_standing.items() if standing is not Standing.GONE for one in some]

    @property
    def is_crowded(self) -> bool:
        """Whether some were passed by for want of room or for being busy."""
        return bool(self.by_standing[Standing.FULL] or self.busy)

    def eligible(self, *, is_under_way: bool) -> Sequence[AnyWorker]:
        """Quarantined workers only where there is no other: a mark must not turn the last worker away.

        Busy ones last, and only for a request that is under way: whoever has lost its worker is not shed.
        """
        return self.healthy or self.by_standing[Standing.QUARANTINED] or (self.busy if is_under_way else ())

    def closed(self) -> list[AnyWorker]:
        """Those that take nobody's request until there is news of them."""
        return [*self.by_standing[Standing.GONE], *(one for one in self.by_standing[Standing.FULL] if one.is_full())]


def view(sessions: Iterable[AnyWorker], needs: Needs, now: float) -> View[AnyWorker]:
    """Sort the sessions."""
    by_standing: dict[Standing, list[AnyWorker]] = {one: [] for one in Standing}
    for one in sessions:
        by_standing[standing(one, needs, now)].append(one)
    return View(needs, by_standing)


def healthy(sessions: Sequence[AnyWorker], needs: Needs, now: float, rng: random.Random) -> Iterator[AnyWorker]:
    """Of the sessions, in random order, those that are. Of many, only LOOKS_MAX are looked at."""
    for one in _drawn(sessions, rng):
        if standing(one, needs, now) is Standing.HEALTHY:
            yield one


def less_loaded(candidates: Iterator[AnyWorker]) -> AnyWorker | None:
    """Of the first two; None where there is none. Of two that are equal, not the one whose load is unknown.

    Of candidates in random order this is the "power of two choices": near the best, without a herd on the best.
    Source: M. Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing" (2001).
    """
    first, second = next(candidates, None), next(candidates, None)
    if first is None or second is None:
        return first
    more = first.in_flight_count - second.in_flight_count
    if more == 0:
        return first if first.ranks() or not second.ranks() else second
    return first if more < 0 else second


def choose(candidates: Sequence[AnyWorker], rng: random.Random) -> AnyWorker | None:
    """The less loaded of two drawn at random; None where there is none."""
    return less_loaded(_drawn(candidates, rng))


def _drawn(sessions: Sequence[AnyWorker], rng: random.Random) -> Iterator[AnyWorker]:
    """In random order, each once: all of them, or LOOKS_MAX at most where there are more."""
    if len(sessions) > LOOKS_MAX:
        drawn: set[int] = set()
        for _ in range(LOOKS_MAX):
            position = int(rng.random() * len(sessions))
            if position not in drawn:
                drawn.add(position)
                yield sessions[position]
        return
    rest = list(sessions)
    while len(rest) > 1:
        position = int(rng.random() * len(rest))
        rest[position], rest[-1] = rest[-1], rest[position]
        yield rest.pop()
    yield from rest
