"""Rejections: failures that tell a client why no worker takes its request, and when to try again.

| case | failure |
| --- | --- |
| the request has more choices than any worker takes at a time | INVALID_ARGUMENT |
| the same, but a registered worker is not connected and may take more | NO_WORKERS |
| there is no worker, or the call excludes all of them | NO_WORKERS |
| a request that lost its worker has found no other in time | NO_WORKERS |
| all workers are full or busy | OVERLOADED |
| the chosen worker itself has refused | its own WORKER_AT_CAPACITY |
"""

import random
from collections.abc import Sequence

from services.core.errors import (
    CAUSE,
    RETRY_AFTER_S_MIN,
    Failure,
    Reason,
    RefusedFor,
    invalid,
    jittered_s,
    wait_for_slot_s,
)
from services.frontend.routing.load import Occupancy
from services.frontend.routing.policy import Survey
from services.frontend.routing.thresholds import excess


class Rejections:
    """Builds rejections. Each has its own `Retry-After`, so that clients do not come back at the same time."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def not_replaced(self, model: str) -> Failure:
        """The rejection of a request that lost its worker and has waited for another in vain."""
        return self.jittered(no_workers(f"no other worker of {model!r} had room or came in time"))

    def jittered(self, rejection: Failure) -> Failure:
        """A copy of the rejection for one request, with a jittered `Retry-After`."""
        own = rejection.copy()
        if own.retry_after_s is not None:
            own.retry_after_s = jittered_s(own.retry_after_s, self._rng)
        return own

    def set_retry_after(self, refusal: Failure) -> None:
        """Jitter the `Retry-After` of a worker's own refusal, within the limits of every `Retry-After`."""
        refusal.retry_after_s = jittered_s(refusal.retry_after_s or RETRY_AFTER_S_MIN, self._rng)


def rejection_of(found: Survey, model: str, registered_count: int) -> Failure:
    """The rejection of new requests that no worker is eligible for. The caller jitters it for each request.

    `registered_count`: registered workers of the model, connected or not.
    """
    count = found.needs.count
    limits = [one.capacity.request_limit for one in found.present]
    known = [limit for limit in limits if limit is not None]
    if known and len(known) == len(limits) and max(known) < count:
        if registered_count > len(limits):
            least = f"no connected worker of {model!r} takes {count} requests at a time"
            return no_workers(f"{least}, and others are not connected {of_registered(registered_count)}")
        return invalid("n", f"n is {count}: no worker of {model!r} takes more than {max(known)} requests at a time")
    if not found.is_crowded:
        return no_workers(f"no worker serves {model!r} at the moment")
    workers = [one.occupancy for one in found.present]
    detail, cause = _bound_met(found, model)
    return Failure(
        Reason.OVERLOADED, detail, retry_after_s=retry_after_s(workers), metadata=cause | limits_and_load(workers)
    )


def _bound_met(found: Survey, model: str) -> tuple[str, dict[str, str]]:
    """The bound that the request has met, as a sentence for people and as metadata for programs.

    If some workers are full and all others busy, it is the thresholds: higher ones would have let the request in.
    """
    thresholds = found.needs.thresholds
    if not found.busy or thresholds is None:
        return f"every worker of {model!r} is at capacity", {CAUSE: RefusedFor.CAPACITY}
    which = f"every worker of {model!r} is"
    if len(found.busy) < len(found.present):
        which = f"some workers of {model!r} are at capacity and all others"
    over = excess([rank for one in found.busy for rank in one.ranks()], thresholds)
    cause = {CAUSE: RefusedFor.BUSY_THRESHOLD.value} | thresholds.named()
    return f"{which} over a busy threshold; the least loaded has {over}", cause


def retry_after_s(workers: Sequence[Occupancy]) -> float:
    """The soonest that one of the workers may have a slot for a request that queues now. Without jitter."""
    known = [wait_for_slot_s(one.waiting, one.service_s, one.slots) for one in workers if one.service_s and one.slots]
    return min(known, default=RETRY_AFTER_S_MIN)


def limits_and_load(workers: Sequence[Occupancy]) -> dict[str, str]:
    """The sums over all workers, under the names that a single worker's refusal uses."""
    return {
        "engine_request_limit": str(sum(one.slots for one in workers)),
        "request_queue_limit": str(sum(one.places for one in workers)),
        "running": str(sum(one.running for one in workers)),
        "waiting": str(sum(one.waiting for one in workers)),
    }


def no_workers(detail: str) -> Failure:
    """NO_WORKERS with the shortest `Retry-After`, because nobody knows when a worker comes."""
    return Failure(Reason.NO_WORKERS, detail, retry_after_s=RETRY_AFTER_S_MIN)


def of_registered(count: int) -> str:
    """The end of a sentence that says that no worker is connected."""
    return f"(registered: {count}): see the log of this frontend"
