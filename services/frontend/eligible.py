"""Which workers a call may go to, which of them it goes to, and what it is told where there is none: pure policy."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from services.card import ModelCard
from services.errors import Failure, Reason, invalid
from services.frontend.busy import Rank, Thresholds, excess, is_busy
from services.frontend.retry_after import RETRY_AFTER_S_MIN, jittered_s, metadata_of, retry_after_s
from services.frontend.worker_load import Occupancy
from services.refusals import CAUSE, RefusedFor
from services.request import Call


class Worker(Protocol):
    """What routing knows of a session to a worker."""

    is_draining: bool
    quarantined_until: float

    @property
    def key(self) -> str: ...

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
    """The sessions there are, and the news of them: see `Pool`."""

    def sessions(self, card: ModelCard) -> Sequence[AnyWorker]: ...

    def session(self, key: str) -> AnyWorker | None: ...

    def quarantine(self, session: AnyWorker) -> None: ...

    @property
    def next_change(self) -> asyncio.Event: ...


@dataclass(frozen=True, slots=True)
class View(Generic[AnyWorker]):
    """How the workers of a model stand towards one call.

    present: those that do not leave. healthy, quarantined: that have room and are not busy. busy: that have room, and
    are over one of the thresholds. is_crowded: whether some were passed by for want of room or for being busy.
    """

    present: Sequence[AnyWorker]
    healthy: Sequence[AnyWorker]
    quarantined: Sequence[AnyWorker]
    busy: Sequence[AnyWorker]
    is_crowded: bool
    thresholds: Thresholds | None = None

    def eligible(self, *, is_under_way: bool) -> Sequence[AnyWorker]:
        """Quarantined workers only where there is no other: a mark must not turn the last worker away.

        Busy ones last, and only for a request that is under way: whoever has lost its worker is not shed.
        """
        return self.healthy or self.quarantined or (self.busy if is_under_way else ())


def view(
    sessions: Sequence[AnyWorker],
    call: Call,
    now: float,
    thresholds: Thresholds | None = None,
    count: int = 1,
    tokens: int = 0,
) -> View[AnyWorker]:
    """Sort the sessions. thresholds: None where nobody counts as busy. count: for how many choices at once. tokens: of
    their prompts together; 0: look only at requests, for the worker itself is to say whether so many tokens may wait.
    """
    present = [one for one in sessions if not one.is_draining]
    free = [one for one in present if not one.is_full(count, tokens) and one.key not in call.excluded]
    busy = [] if thresholds is None else [one for one in free if is_busy(one.ranks(), thresholds)]
    busy_keys = {one.key for one in busy}
    calm = [one for one in free if one.key not in busy_keys]
    return View(
        present=present,
        healthy=[one for one in calm if one.quarantined_until <= now],
        quarantined=[one for one in calm if one.quarantined_until > now],
        busy=busy,
        is_crowded=bool(busy) or any(one.is_full(count, tokens) for one in present),
        thresholds=thresholds,
    )


def choose(candidates: Sequence[AnyWorker], rng: random.Random) -> AnyWorker:
    """The less loaded of two drawn at random ("power of two choices"): near the best, without a herd on the best.

    Of two that are equal, not the one whose load is unknown. Source: M. Mitzenmacher, "The Power of Two Choices in
    Randomized Load Balancing" (2001).
    """
    if len(candidates) == 1:
        return candidates[0]
    first, second = rng.sample(candidates, 2)
    if first.in_flight_count == second.in_flight_count:
        return first if first.ranks() or not second.ranks() else second
    return first if first.in_flight_count < second.in_flight_count else second


def refusal(seen: View[AnyWorker], model: str, count: int, rng: random.Random) -> Failure:
    """What a new request is told for which no worker is eligible. count: how many choices it has."""
    limits = [one.request_limit for one in seen.present]
    known = [limit for limit in limits if limit is not None]
    if known and len(known) == len(limits) and max(known) < count:
        return invalid("n", f"n is {count}: no worker of {model!r} takes more than {max(known)} requests at a time")
    if not seen.is_crowded:
        return no_workers(f"no worker serves {model!r} at the moment", rng)
    workers = [one.occupancy for one in seen.present]
    detail, cause = _bound_met(seen, model)
    return Failure(
        Reason.OVERLOADED,
        detail,
        retry_after_s=retry_after_s(workers, rng),
        metadata=cause | metadata_of(workers),
    )


def _bound_met(seen: View[AnyWorker], model: str) -> tuple[str, dict[str, str]]:
    """The same for people and for programs.

    Where some are full and all others busy, it is for the thresholds: higher ones would have let the request in.
    """
    if not seen.busy or seen.thresholds is None:
        return f"every worker of {model!r} is at capacity", {CAUSE: RefusedFor.CAPACITY}
    which = f"every worker of {model!r} is"
    if len(seen.busy) < len(seen.present):
        which = f"some workers of {model!r} are at capacity and all others"
    over = excess([rank for one in seen.busy for rank in one.ranks()], seen.thresholds)
    cause = {CAUSE: RefusedFor.BUSY_THRESHOLD.value} | seen.thresholds.named()
    return f"{which} over a busy threshold, the least loaded with {over}", cause


def no_workers(detail: str, rng: random.Random) -> Failure:
    """NO_WORKERS: when one comes can't be known."""
    return Failure(Reason.NO_WORKERS, detail, retry_after_s=jittered_s(RETRY_AFTER_S_MIN, rng))
