"""Collectors expose the current thresholds and the load of workers, and nothing that is unknown."""

from contextlib import AsyncExitStack

from prometheus_client import CollectorRegistry

from services.frontend.metrics.collectors import BusyMetrics, MigrationLimitMetrics, WorkerLoadMetrics
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


def test_limit_of_moves_is_the_highest_of_the_models_workers_and_at_most_the_frontends() -> None:
    async def limits(*of_workers: int | None) -> float | None:
        async with AsyncExitStack() as exits:
            machines = [
                await exits.enter_async_context(Machine(f"w{number}", migration_limit=limit).running())
                for number, limit in enumerate(of_workers)
            ]
            pool = await exits.enter_async_context(pool_of(view_of(*machines)))
            registry = CollectorRegistry()
            registry.register(MigrationLimitMetrics(pool, 3, "dynamo_frontend"))
            await until(pool, len(machines))
            return registry.get_sample_value("dynamo_frontend_model_migration_limit", {"model": "mocker"})

    assert run_async(limits()) is None
    assert run_async(limits(0)) == 0
    assert run_async(limits(0, 2, 1)) == 2
    assert run_async(limits(2, 9)) == 3
    assert run_async(limits(2, None)) == 3


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
