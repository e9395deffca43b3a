"""Move: each is counted once with its outcome, and one that led somewhere is told in the log."""

import pytest
from structlog.testing import capture_logs

from services.core.errors import Reason
from services.frontend.metrics.definitions import build_metrics
from services.frontend.migration.move import Move
from services.runtime.loop import clock


def move(reason: Reason = Reason.DISCONNECTED) -> Move:
    return Move("r", "m", reason, away_from="a#1", since=clock(), has_tokens=True, recomputed=12)


@pytest.mark.parametrize(("reason", "level"), [(Reason.DISCONNECTED, "warning"), (Reason.DRAINING, "info")])
def test_one_that_led_somewhere_is_counted_and_told_and_a_planned_one_warns_nobody(reason: Reason, level: str) -> None:
    metrics = build_metrics()

    with capture_logs() as logs:
        move(reason).succeed(metrics, "b#2", 5)

    labels = {"model": "m", "migration_type": "ongoing_request"}
    value = metrics.registry.get_sample_value
    assert value("dynamo_frontend_model_migration_total", labels) == 1
    assert value("dynamo_frontend_model_migration_recomputed_tokens_total", {"model": "m"}) == 12
    seconds = "dynamo_frontend_model_migration_duration_seconds_count"
    assert value(seconds, labels | {"outcome": "success"}) == 1
    told = [(one["log_level"], one["request_id"], one["away_from"], one["to"], one["position"]) for one in logs]
    assert told == [(level, "r", "a#1", "b#2", 5)]


@pytest.mark.parametrize("outcome", ["failure", "cancelled"])
def test_one_that_led_nowhere_took_its_time_and_is_no_move(outcome: str) -> None:
    metrics = build_metrics()

    with capture_logs() as logs:
        move().fail(metrics, outcome)

    labels = {"model": "m", "migration_type": "ongoing_request"}
    value = metrics.registry.get_sample_value
    seconds = "dynamo_frontend_model_migration_duration_seconds_count"
    assert value(seconds, labels | {"outcome": outcome}) == 1
    assert value("dynamo_frontend_model_migration_total", labels) is None
    assert logs == []
