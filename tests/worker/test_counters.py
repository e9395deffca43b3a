"""Counters: waiting times are a histogram in the format of Prometheus."""

from services.worker.counters import WAIT_BUCKETS_S, WaitHistogram


def test_wait_counts_in_its_bucket_all_larger_ones_and_the_sum() -> None:
    waits = WaitHistogram()
    for wait_s in (0, 0, 0.001, 0.002, 301):
        waits.observe(wait_s)

    (metric,) = waits.collect()

    buckets = [sample for sample in metric.samples if sample.name.endswith("_bucket")]
    assert [float(sample.labels["le"]) for sample in buckets] == [*WAIT_BUCKETS_S, float("inf")]
    assert [sample.value for sample in buckets] == [2, 3] + [4] * (len(WAIT_BUCKETS_S) - 2) + [5]
    values = {sample.name.rpartition("_")[2]: sample.value for sample in metric.samples if sample not in buckets}
    assert values == {"count": 5, "sum": 301.003}
