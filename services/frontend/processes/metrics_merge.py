"""What the metrics of several processes come to: one exposition, as if there were one process.

Counters and histograms are summed. What a gauge says decides what becomes of it: see GAUGES.
"""

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import reduce

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

Reading = Sequence[Metric]
"""What one process exposed."""


class Way(Enum):
    """How the values of one series become one.

    | way | value | a process that is gone |
    | --- | --- | --- |
    | TOTAL | sum | counts on: a counter never falls |
    | AT_WORK | sum | counts no more |
    | ALIKE | the highest: all see the same, though not at the same moment | counts no more |
    | FIRST | the lowest: when a series began | counts on |
    """

    TOTAL = "total"
    AT_WORK = "at work"
    ALIKE = "alike"
    FIRST = "first"


GAUGES = {
    "inflight_requests": Way.AT_WORK,
    "disconnected_clients": Way.TOTAL,
    "model_migration_limit": Way.ALIKE,
    "model_busy_threshold": Way.ALIKE,
    "worker_active_decode_blocks": Way.ALIKE,
    "worker_total_decode_blocks": Way.ALIKE,
    "worker_active_prefill_tokens": Way.ALIKE,
}
"""Of a frontend, without the prefix. Each process is told the whole load of a worker, not its own part of it."""
CREATED = "_created"
"""How the gauges end that say when a counter or a histogram began."""
_COMBINE: dict[Way, Callable[[float, float], float]] = {
    Way.TOTAL: lambda one, other: one + other,
    Way.AT_WORK: lambda one, other: one + other,
    Way.ALIKE: max,
    Way.FIRST: min,
}
_OUTLIVING = frozenset({Way.TOTAL, Way.FIRST})


def parsed(exposition: bytes) -> Reading:
    """A process's exposition, in Prometheus' text format."""
    return list(text_string_to_metric_families(exposition.decode()))


def way_of(family: Metric, prefix: str) -> Way:
    """How it is joined. A gauge that is not in the table is summed."""
    if family.type != "gauge":
        return Way.TOTAL
    if family.name.endswith(CREATED):
        return Way.FIRST
    return GAUGES.get(family.name.removeprefix(f"{prefix}_"), Way.AT_WORK)


def outliving(reading: Reading, prefix: str) -> Reading:
    """What still counts when the process is gone."""
    return [family for family in reading if way_of(family, prefix) in _OUTLIVING]


def merged(readings: Iterable[Reading], prefix: str) -> Reading:
    """All of them as one."""
    by_name: dict[str, list[Metric]] = {}
    for reading in readings:
        for family in reading:
            by_name.setdefault(family.name, []).append(family)
    return [_joined_family(families, _COMBINE[way_of(families[0], prefix)]) for families in by_name.values()]


def _joined_family(families: Sequence[Metric], combine: Callable[[float, float], float]) -> Metric:
    series: dict[tuple[str, frozenset[tuple[str, str]]], list[Sample]] = {}
    for family in families:
        for sample in family.samples:
            series.setdefault((sample.name, frozenset(sample.labels.items())), []).append(sample)
    family = Metric(families[0].name, families[0].documentation, families[0].type)
    for samples in series.values():
        family.add_sample(samples[0].name, samples[0].labels, reduce(combine, (one.value for one in samples)))
    return family


class MergedMetrics(Collector):
    """A reading as something to be exposed."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading

    def collect(self) -> Reading:
        return self._reading
