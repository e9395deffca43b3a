"""What a worker counts as it happens, for whoever scrapes it later: nothing of it on the way of a token."""

from collections import Counter
from dataclasses import dataclass, field

from prometheus_client import Histogram

from services.request import Cause, Phase

WAIT_BUCKETS_S = (0, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
"""The first is for those who find a slot free."""


def _wait_s() -> Histogram:
    text = "Seconds from a request's arrival to its slot; 0 where it found one free."
    return Histogram("dynamo_work_handler_permit_wait_seconds", text, buckets=WAIT_BUCKETS_S, registry=None)


@dataclass(slots=True)
class Tally:
    """refused: for capacity, at once. queue_timeouts, queue_deadlines: left the queue because its bound on waiting, or
    their own deadline, had passed. cancelled: ended early, by whom and how far they had come; ENDED is a cancel that
    crossed the end on its way. aborted: taken off the engine before their end. wait_s: from arrival to slot.

    When no cancel is under way `aborted` is the sum of `cancelled` over PREFILL and RUNNING.
    """

    refused: int = 0
    queue_timeouts: int = 0
    queue_deadlines: int = 0
    aborted: int = 0
    cancelled: Counter[tuple[Cause, Phase]] = field(default_factory=Counter)
    wait_s: Histogram = field(default_factory=_wait_s)
