"""What a refusal tells of the workers: how full they are, and when it may be worth another try."""

import random
from collections.abc import Sequence

from services.core.errors import CAUSE, RETRY_AFTER_S_MIN, Failure, Reason, RefusedFor, invalid, jittered_s
from services.frontend.routing.load import Occupancy
from services.frontend.routing.policy import AnyWorker, View
from services.frontend.routing.thresholds import excess


def retry_after_s(workers: Sequence[Occupancy]) -> float:
    """To be jittered: when a slot may be free for one that queues now, on the worker where that is soonest.

    N slots that are all taken come free at a rate of N per service time, and those that wait come first: so it takes
    (waiting + 1) * service time / N.
    """
    known = [(one.waiting + 1) * one.service_s / one.slots for one in workers if one.service_s and one.slots]
    return min(known, default=RETRY_AFTER_S_MIN)


def metadata_of(workers: Sequence[Occupancy]) -> dict[str, str]:
    """Limits and load of all these workers together, under the names that a single worker's refusal has them."""
    return {
        "engine_request_limit": str(sum(one.slots for one in workers)),
        "request_queue_limit": str(sum(one.places for one in workers)),
        "running": str(sum(one.running for one in workers)),
        "waiting": str(sum(one.waiting for one in workers)),
    }


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
    own = failure.copy()
    if own.retry_after_s is not None:
        own.retry_after_s = jittered_s(own.retry_after_s, rng)
    return own
