"""The Prometheus metrics of a worker, under the names that Dynamo's dashboards use."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.worker.engine import Engine
from services.worker.execute import Execute
from services.worker.generations.store import GenerationStore


class WorkerMetrics(Collector):
    """Collects the worker's state when it is scraped, so that a token costs nothing."""

    def __init__(self, execute: Execute, engine: Engine, generations: GenerationStore) -> None:
        self._execute = execute
        self._engine = engine
        self._generations = generations

    def collect(self) -> Iterator[Metric]:
        yield from self._admission()
        yield from self._tenants()
        yield from self._early_ends()
        yield from self._engine_work()
        yield from self._detached()

    def _admission(self) -> Iterator[Metric]:
        execute, counters, limits = self._execute, self._execute.counters, self._execute.limits
        yield GaugeMetricFamily("dynamo_engine_request", "Requests on the engine.", execute.running_count)
        yield GaugeMetricFamily("dynamo_request_queue", "Requests that wait.", execute.waiting_count)
        yield GaugeMetricFamily("dynamo_work_handler_pool_capacity", "Requests that may run.", limits.slots)
        yield GaugeMetricFamily("dynamo_work_handler_queue_capacity", "Requests that may wait.", limits.places)
        text = (
            "Requests refused for capacity by the worker; frontends refuse most requests themselves, and count those."
        )
        yield CounterMetricFamily("dynamo_rejection_request", text, counters.refused)
        yield from counters.wait_s.collect()
        expired = CounterMetricFamily("unbroken_queue_expired", "Requests that waited too long.", labels=["cause"])
        expired.add_metric(["timeout"], counters.queue_timeouts)
        expired.add_metric(["deadline"], counters.queue_deadlines)
        yield expired

    def _tenants(self) -> Iterator[Metric]:
        text = "Tokens of prompts whose requests got a slot, and of answers, by tenant."
        tokens = CounterMetricFamily("unbroken_tenant_service_tokens", text, labels=["tenant", "kind"])
        waiting = GaugeMetricFamily("unbroken_tenant_waiting", "Requests that wait, by tenant.", labels=["tenant"])
        for label, usage in self._execute.usage().items():
            tokens.add_metric([label, "input"], usage.input_tokens)
            tokens.add_metric([label, "output"], usage.output_tokens)
            waiting.add_metric([label], usage.waiting_count)
        yield tokens
        yield waiting

    def _early_ends(self) -> Iterator[Metric]:
        counters = self._execute.counters
        text = "Requests that ended early, by cause and phase."
        cancelled = CounterMetricFamily("dynamo_component_cancellation", text, labels=["cause", "phase"])
        for (cause, phase), number in sorted(counters.cancelled.items()):
            cancelled.add_metric([cause, phase], number)
        yield cancelled
        yield CounterMetricFamily(
            "unbroken_engine_aborts", "Requests removed from the engine before their end.", counters.aborted
        )

    def _detached(self) -> Iterator[Metric]:
        generations = self._generations
        text = "Requests that run although no frontend reads them: they wait to be resumed."
        yield GaugeMetricFamily("unbroken_detached_requests", text, generations.detached_running_count)
        text = "Records without a frontend, of requests that run and of those that have ended."
        yield GaugeMetricFamily("unbroken_detached_records", text, generations.detached_count)
        yield GaugeMetricFamily("unbroken_detached_bytes", "Size of these records.", generations.detached_bytes)

    def _engine_work(self) -> Iterator[Metric]:
        load = self._engine.load()
        for name, text, number in (
            ("steps", "Steps of the engine.", load.steps),
            ("prefill_tokens", "Prompt tokens computed.", load.prefill_tokens),
            ("generated_tokens", "Tokens drawn.", load.generated_tokens),
            ("tokens_after_cancel", "Tokens computed for a request after its cancel.", load.tokens_after_cancel),
        ):
            yield CounterMetricFamily(f"unbroken_engine_{name}", text, number)
        text = "Helper processes lost with a guided form or answer, by cause."
        lost = CounterMetricFamily("unbroken_helpers_lost", text, labels=["cause"])
        for cause, number in sorted(load.helpers_lost.items()):
            lost.add_metric([cause], number)
        yield lost
