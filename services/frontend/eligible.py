"""Which workers a call may go to, which of them it goes to, and what it is told where there is none: pure policy."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Generic, Protocol, TypeVar

from msgspec import Struct

from services.card import ModelCard
from services.errors import Failure, Reason, invalid
from services.frontend.busy import Rank, Thresholds, excess, is_busy
from services.frontend.retry_after import RETRY_AFTER_S_MIN, jittered_s, metadata_of, retry_after_s
from services.frontend.roster import Roster
from services.frontend.worker_load import Occupancy
from services.refusals import CAUSE, RefusedFor

LOOKS_MAX = 8
"""At so many workers a request looks one by one; only where none of them is healthy at all."""


class Worker(Protocol):
    """What routing knows of a session to a worker."""

    is_draining: bool
    quarantined_until: float

    @property
    def key(self) -> str: ...

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

    def mark_full(self, count: int = 1) -> None: ...

    def mark_long(self, tokens: int) -> None: ...


AnyWorker = TypeVar("AnyWorker", bound=Worker)


class Workers(Protocol[AnyWorker]):
    """The sessions there are: see `Pool`."""

    def roster(self, card: ModelCard) -> Roster[AnyWorker]: ...

    def session(self, key: str) -> AnyWorker | None: ...

    def quarantine(self, session: AnyWorker) -> None: ...


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


def refusal(seen: View[AnyWorker], model: str) -> Failure:
    """What new requests are told for which no worker is eligible, but for `jittered`."""
    count = seen.needs.count
    limits = [one.request_limit for one in seen.present]
    known = [limit for limit in limits if limit is not None]
    if known and len(known) == len(limits) and max(known) < count:
        return invalid("n", f"n is {count}: no worker of {model!r} takes more than {max(known)} requests at a time")
    if not seen.is_crowded:
        return no_workers(f"no worker serves {model!r} at the moment")
    workers = [one.occupancy for one in seen.present]
    detail, cause = _bound_met(seen, model)
    return Failure(
        Reason.OVERLOADED,
        detail,
        retry_after_s=retry_after_s(workers),
        metadata=cause | metadata_of(workers),
    )


def _bound_met(seen: View[AnyWorker], model: str) -> tuple[str, dict[str, str]]:
    """The same for people and for programs.

    Where some are full and all others busy, it is for the thresholds: higher ones would have let the request in.
    """
    thresholds = seen.needs.thresholds
    if not seen.busy or thresholds is None:
        return f"every worker of {model!r} is at capacity", {CAUSE: RefusedFor.CAPACITY}
    which = f"every worker of {model!r} is"
    if len(seen.busy) < len(seen.present):
        which = f"some workers of {model!r} are at capacity and all others"
    over = excess([rank for one in seen.busy for rank in one.ranks()], thresholds)
    cause = {CAUSE: RefusedFor.BUSY_THRESHOLD.value} | thresholds.named()
    return f"{which} over a busy threshold, the least loaded with {over}", cause


def no_workers(detail: str) -> Failure:
    """NO_WORKERS, but for `jittered`: when one comes can't be known."""
    return Failure(Reason.NO_WORKERS, detail, retry_after_s=RETRY_AFTER_S_MIN)


def of_registered(count: int) -> str:
    """The end of a sentence that says that none of so many workers is reached."""
    return f"of {count} registered: this frontend's log says why"


def jittered(failure: Failure, rng: random.Random) -> Failure:
    """The same for one request, with a time to come back of its own."""
    own = failure.again()
    if own.retry_after_s is not None:
        own.retry_after_s = jittered_s(own.retry_after_s, rng)
    return own
