"""Chooses the worker for each attempt, and remembers what became of it."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from services.card import ModelCard
from services.errors import Failure, Reason
from services.request import Call, Finish, Layer, Request, Sink

RETRY_AFTER_S = 1.0
"""When a client that found no room may come back: load reports clear the marks of full workers by then."""


class Worker(Protocol):
    """What routing knows of a session to a worker."""

    is_draining: bool
    quarantined_until: float

    @property
    def key(self) -> str: ...

    @property
    def in_flight_count(self) -> int: ...

    def is_full(self) -> bool: ...

    def mark_full(self) -> None: ...


AnyWorker = TypeVar("AnyWorker", bound=Worker)


class Workers(Protocol[AnyWorker]):
    """The sessions there are, and the news of them: see `Pool`."""

    def sessions(self, card: ModelCard) -> Sequence[AnyWorker]: ...

    def quarantine(self, session: AnyWorker) -> None: ...

    @property
    def next_change(self) -> asyncio.Event: ...


def choose(candidates: Sequence[AnyWorker], rng: random.Random) -> AnyWorker:
    """The less loaded of two drawn at random ("power of two choices"): near the best, without a herd on the best.

    Source: M. Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing" (2001).
    """
    if len(candidates) == 1:
        return candidates[0]
    first, second = rng.sample(candidates, 2)
    return first if first.in_flight_count <= second.in_flight_count else second


@dataclass(frozen=True, slots=True)
class View(Generic[AnyWorker]):
    """How the workers of a model stand towards one call."""

    healthy: Sequence[AnyWorker]
    quarantined: Sequence[AnyWorker]
    is_any_full: bool

    @property
    def eligible(self) -> Sequence[AnyWorker]:
        """Quarantined workers only where there is no other: a mark must not turn the last worker away."""
        return self.healthy or self.quarantined


def view(sessions: Sequence[AnyWorker], call: Call, now: float) -> View[AnyWorker]:
    """Sort the sessions: draining, excluded and full ones are not eligible."""
    present = [one for one in sessions if not one.is_draining]
    free = [one for one in present if not one.is_full() and one.key not in call.excluded]
    return View(
        healthy=[one for one in free if one.quarantined_until <= now],
        quarantined=[one for one in free if one.quarantined_until > now],
        is_any_full=any(one.is_full() for one in present),
    )


class Route(Generic[AnyWorker]):
    """Above the transport: the call names its worker."""

    def __init__(self, inner: Layer, pool: Workers[AnyWorker], rng: random.Random) -> None:
        self._inner = inner
        self._pool = pool
        self._rng = rng

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        session = await self._pick(request, call)
        try:
            call.attempt.worker = session.key
            return await self._inner(request, call, sink)
        except Failure as failure:
            if failure.traits.blames_worker:
                self._pool.quarantine(session)
            elif failure.reason is Reason.WORKER_AT_CAPACITY:
                session.mark_full()
                failure.retry_after_s = RETRY_AFTER_S
            elif failure.reason is Reason.DRAINING:
                session.is_draining = True
            raise

    async def _pick(self, request: Request, call: Call) -> AnyWorker:
        """An eligible worker. A call that has lost its worker waits for another until `call.replacement_deadline`."""
        clock, card = asyncio.get_running_loop().time, call.card
        assert card is not None, "preprocess names the card"
        try:
            async with asyncio.timeout_at(call.replacement_deadline):
                while True:
                    change = self._pool.next_change
                    seen = view(self._pool.sessions(card), call, clock())
                    if seen.eligible:
                        return choose(seen.eligible, self._rng)
                    if call.replacement_deadline is None:
                        raise _nobody(request, is_any_full=seen.is_any_full)
                    await change.wait()
        except TimeoutError:
            detail = f"no other worker of {request.model!r} had room or came in time"
            raise Failure(Reason.NO_WORKERS, detail, retry_after_s=RETRY_AFTER_S) from None


def _nobody(request: Request, *, is_any_full: bool) -> Failure:
    if is_any_full:
        reason, detail = Reason.OVERLOADED, f"every worker of {request.model!r} is at capacity"
    else:
        reason, detail = Reason.NO_WORKERS, f"no worker serves {request.model!r} at the moment"
    return Failure(reason, detail, retry_after_s=RETRY_AFTER_S)
