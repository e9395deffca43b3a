"""The counters of a worker, which metrics.py exports. None is updated for each token."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from services.core.call import Cause, Phase

WAIT_BUCKETS_S = (0, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
"""Upper bounds of the buckets. The first is for requests that find a free slot."""


class WaitHistogram:
    """A histogram of waiting times. It runs on one event loop, so it avoids the locks of prometheus_client's."""

    def __init__(self) -> None:
        self._counts = [0] * (len(WAIT_BUCKETS_S) + 1)
        self._sum_s = 0.0

    def observe(self, wait_s: float) -> None:
        """Count one request that has waited `wait_s`."""
        self._counts[bisect_left(WAIT_BUCKETS_S, wait_s)] += 1
        self._sum_s += wait_s

    def collect(self) -> Iterator[Metric]:
        text = "Seconds from a request's arrival to its slot; 0 where it found one free."
        bounds = map(floatToGoString, (*WAIT_BUCKETS_S, inf))
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily("dynamo_work_handler_permit_wait_seconds", text, buckets, self._sum_s)


@dataclass(slots=True)
class Counters:
    """Counts of requests.

    `refused`: refused at once, for lack of capacity. `queue_timeouts`, `queue_deadlines`: left the queue because the
    bound on waiting, or their own deadline, had passed. `cancelled`: ended early, by cause and phase; the phase ENDED
    means that the cancel arrived after the end. `aborted`: removed from the engine before their end. `wait_s`: time
    from arrival to slot.

    While no cancel is in progress, `aborted` is the sum of `cancelled` over the phases PREFILL and RUNNING.
    """

    refused: int = 0
    queue_timeouts: int = 0
    queue_deadlines: int = 0
    aborted: int = 0
    cancelled: Counter[tuple[Cause, Phase]] = field(default_factory=Counter)
    wait_s: WaitHistogram = field(default_factory=WaitHistogram)
