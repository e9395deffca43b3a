"""Merged metrics equal those of one process that did all the work, also after a process has exited."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

from services.access.keys_watch import AccessConfig
from services.frontend.processes.metrics_merge import (
    GAUGES,
    Aggregation,
    Families,
    MergedMetrics,
    kept_after_exit,
    merged,
    parsed,
)
from services.frontend.server import Frontend, FrontendConfig
from tests.support.doubles import run_async
from tests.tls.support import shared_certificates

PREFIX = "p"


def families(fill: Callable[[CollectorRegistry], object]) -> Families:
    """The families that a process exposes after `fill` has filled its registry."""
    registry = CollectorRegistry()
    fill(registry)
    return parsed(generate_latest(registry))


def counter(**by_model: float) -> Families:
    def fill(registry: CollectorRegistry) -> None:
        one = Counter("p_requests", "Requests.", ["model"], registry=registry)
        for model, value in by_model.items():
            one.labels(model).inc(value)

    return families(fill)


def gauge(name: str, **by_model: float) -> Families:
    def fill(registry: CollectorRegistry) -> None:
        one = Gauge(f"p_{name}", "A gauge.", ["model"], registry=registry)
        for model, value in by_model.items():
            one.labels(model).set(value)

    return families(fill)


def value(of: Families, name: str, **labels: str) -> float | None:
    """The value of a series after the merged families have been exposed and parsed again."""
    exposed = parsed(generate_latest(MergedMetrics(of)))
    for sample in (sample for group in exposed for sample in group.samples):
        if (sample.name, sample.labels) == (name, labels):
            return sample.value
    return None


def test_counters_are_summed_series_by_series() -> None:
    both = merged([counter(a=1, b=2), counter(b=3, c=4)], PREFIX)

    assert [value(both, "p_requests_total", model=model) for model in "abcd"] == [1, 5, 4, None]


def test_histograms_are_summed_bucket_by_bucket() -> None:
    def observed(*values: float) -> Families:
        def fill(registry: CollectorRegistry) -> None:
            one = Histogram("p_seconds", "How long.", buckets=(1, 2), registry=registry)
            for each in values:
                one.observe(each)

        return families(fill)

    both = merged([observed(0.5, 1.5), observed(1.5, 9)], PREFIX)

    assert [value(both, "p_seconds_bucket", le=le) for le in ("1.0", "2.0", "+Inf")] == [1, 3, 4]
    assert (value(both, "p_seconds_count"), value(both, "p_seconds_sum")) == (4, 12.5)


@pytest.mark.parametrize(
    ("name", "expected"), [("inflight_requests", 7), ("model_busy_threshold", 4), ("unheard_of", 7)]
)
def test_gauges_are_summed_unless_all_processes_report_the_same_thing(name: str, expected: float) -> None:
    assert value(merged([gauge(name, m=3), gauge(name, m=4)], PREFIX), f"p_{name}", model="m") == expected


def test_created_time_is_that_of_the_oldest_process() -> None:
    parts = [counter(m=1), counter(m=1)]
    begun = [value(part, "p_requests_created", model="m") or 0 for part in parts]

    assert value(merged(parts, PREFIX), "p_requests_created", model="m") == min(begun)


def test_counters_of_exited_processes_are_kept_and_gauges_are_dropped() -> None:
    exited = [*counter(m=1), *gauge("inflight_requests", m=3), *gauge("disconnected_clients", m=2)]
    running = [*counter(m=10), *gauge("inflight_requests", m=4), *gauge("disconnected_clients", m=1)]

    left = merged([kept_after_exit(exited, PREFIX), running], PREFIX)

    names = ("p_requests_total", "p_inflight_requests", "p_disconnected_clients")
    assert [value(left, name, model="m") for name in names] == [11, 4, 3]


def test_merge_is_associative() -> None:
    one, two, three = counter(a=1), counter(a=2, b=5), counter(b=1)

    steps = merged([merged([one, two], PREFIX), three], PREFIX)

    assert generate_latest(MergedMetrics(steps)) == generate_latest(MergedMetrics(merged([one, two, three], PREFIX)))


def test_merge_of_one_process_changes_nothing() -> None:
    alone = [*counter(m=1), *gauge("inflight_requests", m=3)]

    assert generate_latest(MergedMetrics(merged([alone], PREFIX))) == generate_latest(MergedMetrics(alone))


def test_merge_keeps_special_characters_in_labels() -> None:
    strange = counter(**{'a"b\\c\nd é': 1})

    assert value(merged([strange, strange], PREFIX), "p_requests_total", model='a"b\\c\nd é') == 2


WITH_KEYS = AccessConfig(keys_file=Path(os.devnull))


def test_every_gauge_of_the_frontend_has_an_aggregation() -> None:
    """For each new gauge somebody must decide whether it may be summed."""

    async def scenario() -> set[str]:
        config = FrontendConfig(access=WITH_KEYS, tls=shared_certificates().pair())
        registry = Frontend(config)._metrics.registry
        exposed = [family for collector in registry._collector_to_names for family in collector.collect()]
        return {family.name.removeprefix("dynamo_frontend_") for family in exposed if family.type == "gauge"}

    assert run_async(scenario()) == GAUGES.keys()


def test_aggregation_table_lists_every_member() -> None:
    rows = [
        line.split("|")[1].strip() for line in (Aggregation.__doc__ or "").splitlines() if line.strip().startswith("| ")
    ]

    assert rows[2:] == [way.name for way in Aggregation]
