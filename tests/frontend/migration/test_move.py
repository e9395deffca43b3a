"""Move: each is counted once with its outcome, and a successful one is logged."""

import pytest
from structlog.testing import capture_logs

from services.core.errors import Reason
from services.frontend.metrics.definitions import build_metrics
from services.frontend.migration.move import Move
from services.runtime.loop import clock


def move(reason: Reason = Reason.DISCONNECTED) -> Move:
    return Move("r", "m", reason, away_from="a#1", since=clock(), has_tokens=True, recomputed=12)


@pytest.mark.parametrize(("reason", "level"), [(Reason.DISCONNECTED, "warning"), (Reason.DRAINING, "info")])
def test_a_successful_move_is_counted_and_logged_as_a_warning_unless_it_was_planned(reason: Reason, level: str) -> None:
    metrics = build_metrics()

    with capture_logs() as logs:
        move(reason).succeed(metrics, "b#2", 5)

    labels = {"model": "m", "migration_type": "ongoing_request"}
    value = metrics.registry.get_sample_value
    assert value("dynamo_frontend_model_migration_total", labels) == 1
    assert value("dynamo_frontend_model_migration_recomputed_tokens_total", {"model": "m"}) == 12
    seconds = "dynamo_frontend_model_migration_duration_seconds_count"
    assert value(seconds, labels | {"outcome": "success"}) == 1
    logged = [(one["log_level"], one["request_id"], one["away_from"], one["to"], one["position"]) for one in logs]
    assert logged == [(level, "r", "a#1", "b#2", 5)]


@pytest.mark.parametrize("outcome", ["failure", "cancelled"])
def test_a_failed_move_reports_its_duration_and_is_not_counted(outcome: str) -> None:
    metrics = build_metrics()

    with capture_logs() as logs:
        move().fail(metrics, outcome)

    labels = {"model": "m", "migration_type": "ongoing_request"}
    value = metrics.registry.get_sample_value
    seconds = "dynamo_frontend_model_migration_duration_seconds_count"
    assert value(seconds, labels | {"outcome": outcome}) == 1
    assert value("dynamo_frontend_model_migration_total", labels) is None
    assert logs == []
