"""Collectors expose the current thresholds and the load of workers, and nothing that is unknown."""

from prometheus_client import CollectorRegistry

from services.frontend.metrics.collectors import BusyMetrics, WorkerLoadMetrics
from services.frontend.routing.thresholds import AdmissionConfig, BusyThresholds, Thresholds
from services.worker.engines.mocker import MockerConfig
from tests.frontend.session.test_pool import Machine, pool_of, sessions, until, view_of
from tests.support.doubles import models_of, run_async


def test_busy_metrics_have_samples_only_for_thresholds_that_are_set() -> None:
    thresholds = BusyThresholds(AdmissionConfig(thresholds=Thresholds(active_decode_blocks=0.9)))
    registry = CollectorRegistry()
    registry.register(BusyMetrics(models_of(), thresholds, "dynamo_frontend"))

    def value(threshold: str) -> float | None:
        labels = {"model": "m", "threshold": threshold}
        return registry.get_sample_value("dynamo_frontend_model_busy_threshold", labels)

    before = [value("active_decode_blocks"), value("active_prefill_tokens")]
    thresholds.set("m", Thresholds(active_prefill_tokens=0))
    after = [value("active_decode_blocks"), value("active_prefill_tokens")]

    assert before == [0.9, None]
    assert after == [None, 0], "0 is a threshold"


def test_worker_metrics_have_samples_for_known_ranks_and_for_cancels() -> None:
    async def scenario() -> None:
        async with Machine("a").running() as a, pool_of(view_of(a)) as pool:
            registry = CollectorRegistry()
            registry.register(WorkerLoadMetrics(pool, "dynamo_frontend"))
            await until(pool, 1)
            pool.cancels.signals, pool.cancels.late_tokens = 2, 3

            rank = {"worker_id": "a", "dp_rank": "0"}
            assert registry.get_sample_value("dynamo_frontend_worker_active_decode_blocks", rank) == 0
            assert registry.get_sample_value("dynamo_frontend_worker_active_prefill_tokens", rank) == 0
            total = registry.get_sample_value("dynamo_frontend_worker_total_decode_blocks", rank)
            assert total == MockerConfig().kv_blocks_total
            assert registry.get_sample_value("dynamo_frontend_cancel_signals_total") == 2
            assert registry.get_sample_value("dynamo_frontend_tokens_after_cancel_total") == 3

            sessions(pool)[0].candidate.load._reports.clear()
            assert registry.get_sample_value("dynamo_frontend_worker_active_decode_blocks", rank) is None

    run_async(scenario())
