"""What a worker tells Prometheus, under the names that dashboards for this kind of system know."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.worker.engine import Engine
from services.worker.execute import Execute


class WorkerMetrics(Collector):
    """The worker's state, read when somebody scrapes it: nothing is counted on the way of a token."""

    def __init__(self, execute: Execute, engine: Engine) -> None:
        self._execute = execute
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("dynamo_engine_request", "Requests on the engine.", self._execute.running_count)
        yield GaugeMetricFamily("dynamo_request_queue", "Requests that wait.", self._execute.waiting_count)
        yield CounterMetricFamily(
            "dynamo_rejection_request", "Requests refused for capacity.", self._execute.refused_count
        )
        yield CounterMetricFamily("unbroken_engine_steps", "Steps of the engine.", self._engine.load().steps)
