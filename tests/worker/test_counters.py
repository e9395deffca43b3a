"""Tally: what requests waited is a histogram such as Prometheus reads."""

from services.worker.counters import WAIT_BUCKETS_S, Waits


def test_each_wait_is_in_its_bucket_and_in_all_above_it_and_in_the_sum() -> None:
    waits = Waits()
    for wait_s in (0, 0, 0.001, 0.002, 301):
        waits.observe(wait_s)

    (metric,) = waits.collect()

    buckets = [sample for sample in metric.samples if sample.name.endswith("_bucket")]
    assert [float(sample.labels["le"]) for sample in buckets] == [*WAIT_BUCKETS_S, float("inf")]
    assert [sample.value for sample in buckets] == [2, 3] + [4] * (len(WAIT_BUCKETS_S) - 2) + [5]
    values = {sample.name.rpartition("_")[2]: sample.value for sample in metric.samples if sample not in buckets}
    assert values == {"count": 5, "sum": 301.003}
