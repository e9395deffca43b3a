"""Joined metrics: what one process would have told that did the work of all, before and after one of them died."""

from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

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

PREFIX = "p"


def reading(fill: Callable[[CollectorRegistry], object]) -> Families:
    """What a process exposes whose registry was filled so."""
    registry = CollectorRegistry()
    fill(registry)
    return parsed(generate_latest(registry))


def counter(**by_model: float) -> Families:
    def fill(registry: CollectorRegistry) -> None:
        one = Counter("p_requests", "Requests.", ["model"], registry=registry)
        for model, value in by_model.items():
            one.labels(model).inc(value)

    return reading(fill)


def gauge(name: str, **by_model: float) -> Families:
    def fill(registry: CollectorRegistry) -> None:
        one = Gauge(f"p_{name}", "A gauge.", ["model"], registry=registry)
        for model, value in by_model.items():
            one.labels(model).set(value)

    return reading(fill)


def value(of: Families, name: str, **labels: str) -> float | None:
    """As Prometheus would see it once it is exposed again."""
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

        return reading(fill)

    both = merged([observed(0.5, 1.5), observed(1.5, 9)], PREFIX)

    assert [value(both, "p_seconds_bucket", le=le) for le in ("1.0", "2.0", "+Inf")] == [1, 3, 4]
    assert (value(both, "p_seconds_count"), value(both, "p_seconds_sum")) == (4, 12.5)


@pytest.mark.parametrize(
    ("name", "expected"), [("inflight_requests", 7), ("model_busy_threshold", 4), ("unheard_of", 7)]
)
def test_gauges_are_summed_but_for_those_that_all_processes_see_alike(name: str, expected: float) -> None:
    assert value(merged([gauge(name, m=3), gauge(name, m=4)], PREFIX), f"p_{name}", model="m") == expected


def test_a_series_began_when_its_first_part_did() -> None:
    parts = [counter(m=1), counter(m=1)]
    begun = [value(part, "p_requests_created", model="m") or 0 for part in parts]

    assert value(merged(parts, PREFIX), "p_requests_created", model="m") == min(begun)


def test_of_the_dead_what_only_grows_counts_on_and_the_rest_does_not() -> None:
    dead = [*counter(m=1), *gauge("inflight_requests", m=3), *gauge("disconnected_clients", m=2)]
    alive = [*counter(m=10), *gauge("inflight_requests", m=4), *gauge("disconnected_clients", m=1)]

    left = merged([kept_after_exit(dead, PREFIX), alive], PREFIX)

    names = ("p_requests_total", "p_inflight_requests", "p_disconnected_clients")
    assert [value(left, name, model="m") for name in names] == [11, 4, 3]


def test_it_is_the_same_in_whatever_steps_it_is_done() -> None:
    one, two, three = counter(a=1), counter(a=2, b=5), counter(b=1)

    steps = merged([merged([one, two], PREFIX), three], PREFIX)

    assert generate_latest(MergedMetrics(steps)) == generate_latest(MergedMetrics(merged([one, two, three], PREFIX)))


def test_one_alone_stays_as_it_is() -> None:
    alone = [*counter(m=1), *gauge("inflight_requests", m=3)]

    assert generate_latest(MergedMetrics(merged([alone], PREFIX))) == generate_latest(MergedMetrics(alone))


def test_names_and_labels_of_any_kind_survive() -> None:
    strange = counter(**{'a"b\\c\nd é': 1})

    assert value(merged([strange, strange], PREFIX), "p_requests_total", model='a"b\\c\nd é') == 2


def test_each_gauge_of_a_frontend_is_in_the_table_and_no_other() -> None:
    """Whether it may be summed is to be thought of when a gauge is made."""

    async def scenario() -> set[str]:
        registry = Frontend(FrontendConfig())._metrics.registry
        families = [group for collector in registry._collector_to_names for group in collector.collect()]
        return {group.name.removeprefix("dynamo_frontend_") for group in families if group.type == "gauge"}

    assert run_async(scenario()) == GAUGES.keys()


def test_the_table_of_ways_is_whole() -> None:
    rows = [
        line.split("|")[1].strip() for line in (Aggregation.__doc__ or "").splitlines() if line.strip().startswith("| ")
    ]

    assert rows[2:] == [way.name for way in Aggregation]
