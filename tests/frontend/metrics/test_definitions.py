"""The metrics of a frontend have the configured prefix, and moves are counted by their kind."""

import pytest

from services.frontend.metrics.definitions import build_metrics


def test_every_metric_has_the_configured_prefix() -> None:
    names = [family.name for family in build_metrics("mine").registry.collect()]

    assert names
    assert [name for name in names if not name.startswith("mine_")] == []


@pytest.mark.parametrize(("has_tokens", "kind"), [(False, "new_request"), (True, "ongoing_request")])
def test_moves_are_counted_and_timed_by_kind(has_tokens: bool, kind: str) -> None:
    metrics = build_metrics("p")

    metrics.count_move("m", has_tokens=has_tokens, recomputed=30, is_exact=not has_tokens)
    metrics.observe_move("m", has_tokens=has_tokens, outcome="moved", seconds=0.2)

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"p_model_migration{name}", {"model": "m", **labels})

    assert value("_total", migration_type=kind) == 1
    assert value("_recomputed_tokens_total") == 30
    assert value("_from_prefix_total") == (1 if has_tokens else None)
    assert value("_duration_seconds_sum", migration_type=kind, outcome="moved") == 0.2


def test_two_frontends_in_one_process_have_separate_metrics() -> None:
    one, other = build_metrics("p"), build_metrics("p")

    one.count_exceeded("m")

    name = "p_model_migration_max_seq_len_exceeded_total"
    assert one.registry.get_sample_value(name, {"model": "m"}) == 1
    assert other.registry.get_sample_value(name, {"model": "m"}) is None
