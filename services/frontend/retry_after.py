"""What a refusal tells of the workers: how full they are, and when it may be worth another try."""

import random
from collections.abc import Sequence

from services.frontend.worker_load import Occupancy

RETRY_AFTER_S_MIN = 1.0
"""Also where nothing is known: marks of full workers have lapsed by then."""
RETRY_AFTER_S_MAX = 60.0
"""Clients of OpenAI's own make nothing of a longer time."""
JITTER_MIN, JITTER_MAX = 0.8, 1.2
"""Clients that are refused together are not to come back together."""


def retry_after_s(workers: Sequence[Occupancy]) -> float:
    """To be jittered: when a slot may be free for one that queues now, on the worker where that is soonest.

    N slots that are all taken come free at a rate of N per service time, and those that wait come first: so it takes
    (waiting + 1) * service time / N.
    """
    known = [(one.waiting + 1) * one.service_s / one.slots for one in workers if one.service_s and one.slots]
    return min(known, default=RETRY_AFTER_S_MIN)


def jittered_s(seconds: float, rng: random.Random) -> float:
    """About so long, from RETRY_AFTER_S_MIN to RETRY_AFTER_S_MAX; at these bounds, too, not the same for everybody."""
    middle_s = min(max(seconds, RETRY_AFTER_S_MIN / JITTER_MIN), RETRY_AFTER_S_MAX / JITTER_MAX)
    return middle_s * rng.uniform(JITTER_MIN, JITTER_MAX)


def metadata_of(workers: Sequence[Occupancy]) -> dict[str, str]:
    """Limits and load of all these workers together, under the names that a single worker's refusal has them."""
    return {
        "engine_request_limit": str(sum(one.slots for one in workers)),
        "request_queue_limit": str(sum(one.places for one in workers)),
        "running": str(sum(one.running for one in workers)),
        "waiting": str(sum(one.waiting for one in workers)),
    }
