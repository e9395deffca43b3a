"""The frontend's metrics, under the names that dashboards for this kind of system know."""

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

PREFIX = "dynamo_frontend"
UNKNOWN_MODEL = "unknown"
"""What metrics call a model that does not exist: names that clients make up must not become time series."""
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)


@dataclass(frozen=True)
class Metrics:
    """Nothing here is touched for a token: only when a request begins, starts to answer, moves or ends."""

    registry: CollectorRegistry
    requests: Counter
    rejections: Counter
    rejection_causes: Counter
    cancellations: Counter
    disconnected: Gauge
    inflight: Gauge
    first_token_s: Histogram
    duration_s: Histogram
    prompt_tokens: Histogram
    completion_tokens: Histogram
    migrations: Counter
    migration_s: Histogram
    migration_exceeded: Counter
    recomputed_tokens: Counter
    migration_limit: Gauge

    def count_move(self, model: str, *, has_tokens: bool, recomputed: int) -> None:
        """See MigrationMetrics."""
        self.migrations.labels(model, _kind(has_tokens)).inc()
        self.recomputed_tokens.labels(model).inc(recomputed)

    def observe_move(self, model: str, *, has_tokens: bool, outcome: str, seconds: float) -> None:
        """See MigrationMetrics."""
        self.migration_s.labels(model, _kind(has_tokens), outcome).observe(seconds)

    def set_limit(self, model: str, limit: int) -> None:
        """See MigrationMetrics."""
        self.migration_limit.labels(model).set(limit)

    def count_exceeded(self, model: str) -> None:
        """See MigrationMetrics."""
        self.migration_exceeded.labels(model).inc()


def _kind(has_tokens: bool) -> str:
    return "ongoing_request" if has_tokens else "new_request"


def build_metrics(prefix: str = PREFIX) -> Metrics:
    """A set of its own for each frontend process."""
    registry = CollectorRegistry()

    def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"{prefix}_{name}", text, ["model"], buckets=buckets, registry=registry)

    return Metrics(
        registry=registry,
        requests=Counter(
            f"{prefix}_requests",
            "Requests by outcome; error_type is the reason of a failure.",
            ["model", "endpoint", "request_type", "status", "error_type"],
            registry=registry,
        ),
        rejections=Counter(
            f"{prefix}_model_rejection",
            "Requests refused for want of capacity, before their first token or after.",
            ["model", "endpoint"],
            registry=registry,
        ),
        rejection_causes=Counter(
            f"{prefix}_model_rejection_cause",
            "Requests refused for want of capacity, by the bound that was met.",
            ["model", "cause"],
            registry=registry,
        ),
        cancellations=Counter(
            f"{prefix}_model_cancellation",
            "Requests ended before their answer was complete, by cause.",
            ["model", "endpoint", "request_type", "cause"],
            registry=registry,
        ),
        disconnected=Gauge(
            f"{prefix}_disconnected_clients",
            "Clients that left before their answer was complete, since the start: a gauge by tradition, it only grows.",
            registry=registry,
        ),
        inflight=Gauge(f"{prefix}_inflight_requests", "Requests under way.", ["model"], registry=registry),
        first_token_s=histogram("time_to_first_token_seconds", "From the request to its first token.", _SECONDS),
        duration_s=histogram("request_duration_seconds", "From the request to its end.", _SECONDS),
        prompt_tokens=histogram("input_sequence_tokens", "Tokens of the prompt.", _TOKENS),
        completion_tokens=histogram("output_sequence_tokens", "Tokens of the answer.", _TOKENS),
        migrations=Counter(
            f"{prefix}_model_migration",
            "Moves of a request to another worker, before its first token or after.",
            ["model", "migration_type"],
            registry=registry,
        ),
        migration_s=Histogram(
            f"{prefix}_model_migration_duration_seconds",
            "From the loss of a worker to the next token, the wait for room elsewhere included.",
            ["model", "migration_type", "outcome"],
            buckets=_SECONDS,
            registry=registry,
        ),
        migration_exceeded=Counter(
            f"{prefix}_model_migration_max_seq_len_exceeded",
            "Requests too long to be moved any more.",
            ["model"],
            registry=registry,
        ),
        migration_limit=Gauge(
            f"{prefix}_model_migration_limit", "Moves that a request may make.", ["model"], registry=registry
        ),
        recomputed_tokens=Counter(
            f"{prefix}_model_migration_recomputed_tokens",
            "Tokens that a second worker had to compute again.",
            ["model"],
            registry=registry,
        ),
    )
