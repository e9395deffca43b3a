"""WorkerMetrics: a scrape reports the current state, under the names that dashboards use."""

import asyncio
from collections.abc import Mapping

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from services.isolation.losses import Loss
from services.worker.dispatcher import Limits
from services.worker.engine import Engine, EngineLoad
from services.worker.execute import Execute
from services.worker.generations.store import DetachConfig, GenerationStore
from services.worker.metrics import WorkerMetrics
from tests.support.clock import pass_time, run_clocked, settle
from tests.support.doubles import call_layer, make_request
from tests.support.manual_worker import ManualEngine


class LoadedEngine(ManualEngine):
    """An engine that has done some work."""

    def load(self) -> EngineLoad:
        lost = {Loss.CPU: 2, Loss.KILLED: 1}
        return EngineLoad(7, (), prefill_tokens=100, generated_tokens=50, tokens_after_cancel=3, helpers_lost=lost)


def scraped(metrics: WorkerMetrics) -> Mapping[str, float]:
    registry = CollectorRegistry()
    registry.register(metrics)
    lines = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def metrics_of(execute: Execute, engine: Engine) -> WorkerMetrics:
    """The metrics of a worker without generations."""
    return WorkerMetrics(execute, engine, GenerationStore(execute, DetachConfig()))


def test_every_metric_is_exported_before_the_first_request() -> None:
    async def scenario() -> Mapping[str, float]:
        engine = LoadedEngine()
        return scraped(metrics_of(Execute(engine, Limits(slots=2, places=3)), engine))

    seen = run_clocked(scenario())

    expected = {
        "dynamo_engine_request": 0,
        "dynamo_request_queue": 0,
        "dynamo_work_handler_pool_capacity": 2,
        "dynamo_work_handler_queue_capacity": 3,
        "dynamo_rejection_request_total": 0,
        "dynamo_work_handler_permit_wait_seconds_count": 0,
        'unbroken_queue_expired_total{cause="timeout"}': 0,
        'unbroken_queue_expired_total{cause="deadline"}': 0,
        "unbroken_engine_aborts_total": 0,
        "unbroken_engine_steps_total": 7,
        "unbroken_engine_prefill_tokens_total": 100,
        "unbroken_engine_generated_tokens_total": 50,
        "unbroken_engine_tokens_after_cancel_total": 3,
        'unbroken_helpers_lost_total{cause="cpu"}': 2,
        'unbroken_helpers_lost_total{cause="killed"}': 1,
    }
    assert {name: seen[name] for name in expected} == expected


def test_each_outcome_is_counted_by_its_metric() -> None:
    """N = 1, Q = 2: one request runs, one waits until its deadline, one until the bound on waiting, one is refused."""

    async def scenario() -> Mapping[str, float]:
        engine = ManualEngine()
        execute = Execute(engine, Limits(slots=1, places=2, wait_s=5.0))
        async with asyncio.TaskGroup() as group:

            async def ask(deadline: float | None = None) -> None:
                with pytest.raises(BaseException):  # noqa: B017, PT011 - test_execute.py tests how each of them ends
                    async with asyncio.timeout_at(deadline):
                        await call_layer(execute, make_request(), deadline=deadline)

            running = group.create_task(ask())
            for deadline in (4.0, None, None):
                group.create_task(ask(deadline))
            await settle()
            for _ in range(2):
                pass_time(4)
                await settle()
            running.cancel()
        return scraped(metrics_of(execute, engine))

    seen = run_clocked(scenario())

    expected = {
        "dynamo_rejection_request_total": 1,
        'unbroken_queue_expired_total{cause="timeout"}': 1,
        'unbroken_queue_expired_total{cause="deadline"}': 1,
        'dynamo_component_cancellation_total{cause="deadline",phase="queued"}': 1,
        'dynamo_component_cancellation_total{cause="client_disconnect",phase="prefill"}': 1,
        "unbroken_engine_aborts_total": 1,
        "dynamo_work_handler_permit_wait_seconds_count": 1,
        'dynamo_work_handler_permit_wait_seconds_bucket{le="0.0"}': 1,
    }
    assert {name: seen[name] for name in expected} == expected
