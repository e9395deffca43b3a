"""The frontend's metrics of its workers: the load of ranks that are known, and what cancels brought."""

from prometheus_client import CollectorRegistry

from services.frontend.worker_metrics import WorkerMetrics
from services.worker.engines.mocker import MockerConfig
from tests.frontend.test_pool import Machine, pool_of, sessions, until, view_of
from tests.support import run_async


def test_tells_the_load_of_known_ranks_and_counts_of_cancels() -> None:
    async def scenario() -> None:
        async with Machine("a").running() as a, pool_of(view_of(a)) as pool:
            registry = CollectorRegistry()
            registry.register(WorkerMetrics(pool, "dynamo_frontend"))
            await until(pool, 1)
            pool.cancels.signals, pool.cancels.late_tokens = 2, 3

            rank = {"worker_id": "a", "dp_rank": "0"}
            assert registry.get_sample_value("dynamo_frontend_worker_active_decode_blocks", rank) == 0
            assert registry.get_sample_value("dynamo_frontend_worker_active_prefill_tokens", rank) == 0
            total = registry.get_sample_value("dynamo_frontend_worker_total_decode_blocks", rank)
            assert total == MockerConfig().kv_blocks_total
            assert registry.get_sample_value("dynamo_frontend_cancel_signals_total") == 2
            assert registry.get_sample_value("dynamo_frontend_tokens_after_cancel_total") == 3

            sessions(pool)[0]._load._reports.clear()
            assert registry.get_sample_value("dynamo_frontend_worker_active_decode_blocks", rank) is None

    run_async(scenario())
