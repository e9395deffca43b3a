"""Collectors of values that exist elsewhere and are read on each scrape: busy thresholds, and what workers say."""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.frontend.limits.tenant_limits import TenantLimits
from services.frontend.migration.policy import lowest
from services.frontend.model_catalog import ModelCatalog
from services.frontend.routing.thresholds import THRESHOLDS, BusyThresholds
from services.frontend.session.pool import Pool

WORKER_LABELS = ["worker_id", "dp_rank"]


class BusyMetrics(Collector):
    """The thresholds above which workers count as busy. A threshold that is not set has no sample."""

    def __init__(self, catalog: ModelCatalog, thresholds: BusyThresholds, prefix: str) -> None:
        self._catalog = catalog
        self._thresholds = thresholds
        self._prefix = prefix

    def collect(self) -> Iterator[Metric]:
        text = "Current busy thresholds. They have an effect only with --admission-control token-capacity."
        family = GaugeMetricFamily(f"{self._prefix}_model_busy_threshold", text, labels=["model", "threshold"])
        for model in self._catalog.names():
            thresholds = self._thresholds.of(model)
            for name in THRESHOLDS.values():
                if (value := getattr(thresholds, name)) is not None:
                    family.add_metric([model, name], value)
        yield family


class MigrationLimitMetrics(Collector):
    """The limit of moves of each model that has workers: the highest of theirs, and never above the frontend's."""

    def __init__(self, pool: Pool, limit: int, prefix: str) -> None:
        """`limit`: the frontend's."""
        self._pool = pool
        self._limit = limit
        self._prefix = prefix

    def collect(self) -> Iterator[Metric]:
        text = "Maximum number of moves of a request, on the worker that allows most."
        family = GaugeMetricFamily(f"{self._prefix}_model_migration_limit", text, labels=["model"])
        limits: dict[str, int] = {}
        for session in self._pool.all_sessions():
            limit = lowest(self._limit, session.migration_limit)
            limits[session.card.model] = max(limit, limits.get(session.card.model, limit))
        for model in sorted(limits):
            family.add_metric([model], limits[model])
        yield family


class TenantMetrics(Collector):
    """The requests that were refused because their tenant had used up a limit."""

    def __init__(self, limits: TenantLimits, frontend_count: Callable[[], int], prefix: str) -> None:
        self._limits = limits
        self._frontend_count = frontend_count
        self._prefix = prefix

    def collect(self) -> Iterator[Metric]:
        text = "Requests refused because their tenant had used up a limit, by limit."
        family = CounterMetricFamily(f"{self._prefix}_tenant_refusals", text, labels=["tenant", "cause"])
        for (tenant, cause), count in sorted(self._limits.refusals.items()):
            family.add_metric([tenant, cause], count)
        yield family
        text = "Frontend processes that share the limits of tenants, as workers count them."
        yield GaugeMetricFamily(f"{self._prefix}_limit_shares", text, self._frontend_count())


class WorkerLoadMetrics(Collector):
    """The load that workers report, and the cancels sent to them. A rank whose load is unknown has no sample."""

    def __init__(self, pool: Pool, prefix: str) -> None:
        self._pool = pool
        self._prefix = prefix

    def collect(self) -> Iterator[Metric]:
        yield from self._loads()
        cancels = self._pool.cancels
        yield CounterMetricFamily(f"{self._prefix}_cancel_signals", "Cancels sent to workers.", cancels.signals)
        yield CounterMetricFamily(
            f"{self._prefix}_tokens_after_cancel", "Tokens received for cancelled requests.", cancels.late_tokens
        )

    def _loads(self) -> Iterator[Metric]:
        blocks = self._gauge("active_decode_blocks", "Key-value cache blocks in use.")
        total = self._gauge("total_decode_blocks", "Key-value cache blocks in total.")
        tokens = self._gauge("active_prefill_tokens", "Prompt tokens still to be computed.")
        for session in self._pool.all_sessions():
            for rank in session.candidate.ranks():
                labels = [session.record.instance_id, str(rank.dp_rank)]
                blocks.add_metric(labels, rank.kv_blocks_used)
                total.add_metric(labels, rank.kv_blocks_total)
                tokens.add_metric(labels, rank.active_prefill_tokens)
        yield from (blocks, total, tokens)

    def _gauge(self, name: str, text: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"{self._prefix}_worker_{name}", text, labels=WORKER_LABELS)
