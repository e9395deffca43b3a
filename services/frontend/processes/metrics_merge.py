"""Merges the metrics of several processes into one exposition, as if one process had counted everything.

Counters and histograms are summed. How a gauge is merged depends on what it measures: see GAUGES.
"""

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import reduce

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

Families = Sequence[Metric]
"""The metric families that one process exposed."""


class Aggregation(Enum):
    """How the values of one series are merged.

    | aggregation | value | after a process has exited |
    | --- | --- | --- |
    | SUM_OF_ALL | sum | its value still counts: a counter never falls |
    | SUM_OF_RUNNING | sum | its value is dropped |
    | MAX_OF_RUNNING | maximum: all processes report the same, but not at the same moment | its value is dropped |
    | MIN_OF_RUNNING | minimum: the first to change is the first that matters | its value is dropped |
    | MIN_OF_ALL | minimum: the time at which a series began | its value still counts |
    """

    SUM_OF_ALL = "sum of all"
    SUM_OF_RUNNING = "sum of running"
    MAX_OF_RUNNING = "max of running"
    MIN_OF_RUNNING = "min of running"
    MIN_OF_ALL = "min of all"


GAUGES = {
    "inflight_requests": Aggregation.SUM_OF_RUNNING,
    "connections": Aggregation.SUM_OF_RUNNING,
    "connections_limit": Aggregation.SUM_OF_RUNNING,
    "disconnected_clients": Aggregation.SUM_OF_ALL,
    "model_migration_limit": Aggregation.MAX_OF_RUNNING,
    "model_busy_threshold": Aggregation.MAX_OF_RUNNING,
    "limit_shares": Aggregation.MAX_OF_RUNNING,
    "worker_active_decode_blocks": Aggregation.MAX_OF_RUNNING,
    "worker_total_decode_blocks": Aggregation.MAX_OF_RUNNING,
    "worker_active_prefill_tokens": Aggregation.MAX_OF_RUNNING,
    "tls_certificate_expiry_timestamp_seconds": Aggregation.MIN_OF_RUNNING,
}
"""The frontend's gauges, without the prefix. A worker reports its whole load to each process, not a share of it."""
CREATED = "_created"
"""The suffix of gauges that hold the time at which a counter or a histogram began."""
_COMBINE: dict[Aggregation, Callable[[float, float], float]] = {
    Aggregation.SUM_OF_ALL: lambda one, other: one + other,
    Aggregation.SUM_OF_RUNNING: lambda one, other: one + other,
    Aggregation.MAX_OF_RUNNING: max,
    Aggregation.MIN_OF_RUNNING: min,
    Aggregation.MIN_OF_ALL: min,
}
_KEPT_AFTER_EXIT = frozenset({Aggregation.SUM_OF_ALL, Aggregation.MIN_OF_ALL})


def parsed(exposition: bytes) -> Families:
    """Parse a process's exposition in the Prometheus text format."""
    return list(text_string_to_metric_families(exposition.decode()))


def aggregation_of(family: Metric, prefix: str) -> Aggregation:
    """How to merge the family. A gauge that GAUGES does not list is summed over the running processes."""
    if family.type != "gauge":
        return Aggregation.SUM_OF_ALL
    if family.name.endswith(CREATED):
        return Aggregation.MIN_OF_ALL
    return GAUGES.get(family.name.removeprefix(f"{prefix}_"), Aggregation.SUM_OF_RUNNING)


def kept_after_exit(families: Families, prefix: str) -> Families:
    """The families that still count after their process has exited."""
    return [family for family in families if aggregation_of(family, prefix) in _KEPT_AFTER_EXIT]


def merged(by_process: Iterable[Families], prefix: str) -> Families:
    """Merge the families of several processes."""
    by_name: dict[str, list[Metric]] = {}
    for families in by_process:
        for family in families:
            by_name.setdefault(family.name, []).append(family)
    return [_merged_family(same, _COMBINE[aggregation_of(same[0], prefix)]) for same in by_name.values()]


def _merged_family(families: Sequence[Metric], combine: Callable[[float, float], float]) -> Metric:
    series: dict[tuple[str, frozenset[tuple[str, str]]], list[Sample]] = {}
    for family in families:
        for sample in family.samples:
            series.setdefault((sample.name, frozenset(sample.labels.items())), []).append(sample)
    family = Metric(families[0].name, families[0].documentation, families[0].type)
    for samples in series.values():
        family.add_sample(samples[0].name, samples[0].labels, reduce(combine, (one.value for one in samples)))
    return family


class MergedMetrics(Collector):
    """Exposes merged families as a collector."""

    def __init__(self, families: Families) -> None:
        self._families = families

    def collect(self) -> Families:
        return self._families
