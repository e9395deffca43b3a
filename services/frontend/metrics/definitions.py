"""Definitions of the frontend's metrics, under names that existing dashboards for LLM frontends use."""

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.core.errors import Reason, RefusedFor
from services.isolation.losses import Loss

PREFIX = "dynamo_frontend"
ENDPOINTS = {"/v1/completions": "completions", "/v1/chat/completions": "chat_completions"}
OTHER_ENDPOINT = "other"
UNKNOWN_MODEL = "unknown"
"""The model label of requests for unknown models: names that clients make up must not become time series."""
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)


@dataclass(frozen=True)
class Metrics:
    """The metrics of one frontend process. Updated when a request begins, moves or ends, never for a single token."""

    registry: CollectorRegistry
    requests: Counter
    rejections: Counter
    rejection_causes: Counter
    cancellations: Counter
    disconnected: Gauge
    accept_pauses: Counter
    inflight: Gauge
    first_token_s: Histogram
    duration_s: Histogram
    prompt_tokens: Histogram
    completion_tokens: Histogram
    migrations: Counter
    migrations_from_prefix: Counter
    migration_s: Histogram
    migration_exceeded: Counter
    recomputed_tokens: Counter
    helpers_lost: Counter

    def count_refused(self, path: str) -> None:
        """See Shortage. The log has one line for many of these."""
        endpoint = ENDPOINTS.get(path, OTHER_ENDPOINT)
        self.requests.labels(UNKNOWN_MODEL, endpoint, "unary", "error", Reason.OVERLOADED).inc()
        self.rejections.labels(UNKNOWN_MODEL, endpoint).inc()
        self.rejection_causes.labels(UNKNOWN_MODEL, RefusedFor.CONNECTIONS).inc()

    def count_pause(self) -> None:
        """See Shortage."""
        self.accept_pauses.inc()

    def count_move(self, model: str, *, has_tokens: bool, recomputed: int, is_exact: bool) -> None:
        """See MigrationMetrics."""
        self.migrations.labels(model, _kind(has_tokens)).inc()
        self.recomputed_tokens.labels(model).inc(recomputed)
        if not is_exact:
            self.migrations_from_prefix.labels(model).inc()

    def observe_move(self, model: str, *, has_tokens: bool, outcome: str, seconds: float) -> None:
        """See MigrationMetrics."""
        self.migration_s.labels(model, _kind(has_tokens), outcome).observe(seconds)

    def count_exceeded(self, model: str) -> None:
        """See MigrationMetrics."""
        self.migration_exceeded.labels(model).inc()

    def count_lost(self, loss: Loss) -> None:
        """Count a helper process that was lost with a prompt."""
        self.helpers_lost.labels(loss).inc()


def _kind(has_tokens: bool) -> str:
    return "ongoing_request" if has_tokens else "new_request"


class _Factory:
    """Creates metrics with a common prefix in a registry of their own."""

    def __init__(self, prefix: str) -> None:
        self.registry = CollectorRegistry()
        self._prefix = prefix

    def counter(self, name: str, text: str, labels: tuple[str, ...]) -> Counter:
        return Counter(f"{self._prefix}_{name}", text, labels, registry=self.registry)

    def gauge(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
        return Gauge(f"{self._prefix}_{name}", text, labels, registry=self.registry)

    def histogram(
        self, name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ("model",)
    ) -> Histogram:
        return Histogram(f"{self._prefix}_{name}", text, labels, buckets=buckets, registry=self.registry)


def build_metrics(prefix: str = PREFIX) -> Metrics:
    """Create the metrics of one frontend process, in a registry of their own."""
    make = _Factory(prefix)
    return Metrics(
        registry=make.registry,
        requests=make.counter(
            "requests",
            "Requests by outcome; error_type is the reason of a failure.",
            ("model", "endpoint", "request_type", "status", "error_type"),
        ),
        rejections=make.counter(
            "model_rejection",
            "Requests refused for lack of capacity, before or after their first token.",
            ("model", "endpoint"),
        ),
        rejection_causes=make.counter(
            "model_rejection_cause",
            "Requests refused for lack of capacity, by the limit that was reached.",
            ("model", "cause"),
        ),
        cancellations=make.counter(
            "model_cancellation",
            "Requests ended before their answer was complete, by cause.",
            ("model", "endpoint", "request_type", "cause"),
        ),
        disconnected=make.gauge(
            "disconnected_clients",
            "Clients that left before their answer was complete, since the start. A gauge that never decreases.",
        ),
        accept_pauses=make.counter(
            "accept_pauses", "Times that no connection could be accepted for want of file descriptors or memory.", ()
        ),
        inflight=make.gauge("inflight_requests", "Running requests.", ("model",)),
        first_token_s=make.histogram("time_to_first_token_seconds", "From the request to its first token.", _SECONDS),
        duration_s=make.histogram("request_duration_seconds", "From the request to its end.", _SECONDS),
        prompt_tokens=make.histogram("input_sequence_tokens", "Tokens of the prompt.", _TOKENS),
        completion_tokens=make.histogram("output_sequence_tokens", "Tokens of the answer.", _TOKENS),
        migrations=make.counter(
            "model_migration",
            "Moves of requests to another worker, before or after their first token.",
            ("model", "migration_type"),
        ),
        migrations_from_prefix=make.counter(
            "model_migration_from_prefix", "Moves after which an answer went on with other draws.", ("model",)
        ),
        migration_s=make.histogram(
            "model_migration_duration_seconds",
            "From the loss of a worker to the next token, including the wait for capacity elsewhere.",
            _SECONDS,
            ("model", "migration_type", "outcome"),
        ),
        migration_exceeded=make.counter(
            "model_migration_max_seq_len_exceeded", "Requests that were too long to move.", ("model",)
        ),
        recomputed_tokens=make.counter(
            "model_migration_recomputed_tokens", "Tokens that were computed again after a move.", ("model",)
        ),
        helpers_lost=make.counter("helpers_lost", "Helper processes lost with a prompt, by cause.", ("cause",)),
    )
