"""Busy: any threshold strictly exceeded, on all ranks that are known, where admission control is on."""

from dataclasses import replace
from typing import Any

import pytest

from services.core.errors import Failure, Reason
from services.frontend.routing.thresholds import AdmissionConfig, BusyThresholds, Thresholds, excess, is_busy
from services.worker.engine import RankLoad

IDLE = RankLoad(kv_blocks_used=0, kv_blocks_total=100, active_prefill_tokens=0)
BOTH = Thresholds(active_decode_blocks=0.5, active_prefill_tokens=10)


@pytest.mark.parametrize(
    ("used", "total", "threshold", "expected"),
    [
        (50, 100, 0.5, False),
        (51, 100, 0.5, True),
        (29, 100, 0.29, False),
        (0, 100, 0.0, False),
        (1, 100, 0.0, True),
        (100, 100, 1.0, False),
        (0, 0, 0.0, False),
    ],
)
def test_blocks_are_exceeded_strictly(used: int, total: int, threshold: float, expected: bool) -> None:
    rank = replace(IDLE, kv_blocks_used=used, kv_blocks_total=total)

    assert is_busy([rank], Thresholds(active_decode_blocks=threshold)) is expected


@pytest.mark.parametrize(("tokens", "threshold", "expected"), [(10, 10, False), (11, 10, True), (1, 0, True)])
def test_prefill_tokens_are_exceeded_strictly(tokens: int, threshold: int, expected: bool) -> None:
    rank = replace(IDLE, active_prefill_tokens=tokens)

    assert is_busy([rank], Thresholds(active_prefill_tokens=threshold)) is expected


@pytest.mark.parametrize("busy", [{"kv_blocks_used": 51}, {"active_prefill_tokens": 11}])
def test_any_threshold_is_enough(busy: dict[str, int]) -> None:
    assert is_busy([replace(IDLE, **busy)], BOTH)


def test_every_known_rank_has_to_be_busy_each_by_a_threshold_of_its_own() -> None:
    by_blocks, by_tokens = replace(IDLE, kv_blocks_used=51), replace(IDLE, active_prefill_tokens=11)

    assert is_busy([by_blocks, by_tokens], BOTH)
    assert not is_busy([by_blocks, IDLE], BOTH)


def test_a_worker_of_which_no_rank_is_known_is_not_busy() -> None:
    assert not is_busy([], Thresholds(active_decode_blocks=0.0, active_prefill_tokens=0))


def test_without_thresholds_nobody_is_busy() -> None:
    assert not is_busy([RankLoad(100, 100, 10**9)], Thresholds())


def test_what_is_exceeded_is_said_of_the_least_loaded_rank_and_for_each_threshold_it_is_over() -> None:
    thresholds = Thresholds(active_decode_blocks=0.25, active_prefill_tokens=100)
    ranks = [RankLoad(9, 9, 900), RankLoad(3, 9, 101), RankLoad(4, 9, 0)]

    blocks, tokens = "active_decode_blocks 0.3333 (3 of 9) of at most 0.25", "active_prefill_tokens 101 of at most 100"
    assert excess(ranks, thresholds) == f"{blocks}, {tokens}"
    assert excess(ranks[1:2], Thresholds(active_prefill_tokens=100)) == tokens
    assert excess(ranks[2:], thresholds).endswith("(4 of 9) of at most 0.25")


def test_thresholds_are_named_as_clients_set_them_and_only_those_that_are_set() -> None:
    assert Thresholds().named() == {}
    assert Thresholds(active_decode_blocks=0.123456789, active_prefill_tokens=0).named() == {
        "active_decode_blocks_threshold": "0.123456789",
        "active_prefill_tokens_threshold": "0",
    }


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("active_decode_blocks", float("nan")),
        ("active_decode_blocks", float("inf")),
        ("active_decode_blocks", -float("inf")),
        ("active_decode_blocks", -0.01),
        ("active_decode_blocks", 1.01),
        ("active_prefill_tokens", -1),
    ],
)
def test_a_threshold_out_of_range_is_refused_by_its_name(field: str, value: Any) -> None:
    with pytest.raises(Failure) as caught:
        Thresholds(**{field: value})

    assert (caught.value.reason, caught.value.param) == (Reason.INVALID_ARGUMENT, f"{field}_threshold")


@pytest.mark.parametrize("edge", [0, 1])
def test_the_ends_of_the_range_are_in_it(edge: int) -> None:
    assert Thresholds(active_decode_blocks=edge, active_prefill_tokens=edge).active_decode_blocks == edge


def test_what_is_set_for_a_model_counts_at_once_and_for_it_alone() -> None:
    busy, lower = BusyThresholds(AdmissionConfig(is_on=True, thresholds=BOTH)), Thresholds(active_decode_blocks=0.4)

    busy.set("m", lower)

    assert (busy.of("m"), busy.of("other")) == (lower, BOTH)
    assert (busy.acting("m"), busy.acting("other")) == (lower, BOTH)


def test_thresholds_can_be_set_but_do_not_act_where_admission_control_is_off() -> None:
    busy, low = BusyThresholds(AdmissionConfig()), Thresholds(active_decode_blocks=0.1)

    busy.set("m", low)

    assert (busy.is_on, busy.of("m"), busy.acting("m")) == (False, low, None)


def test_nothing_acts_on_a_model_without_thresholds() -> None:
    busy = BusyThresholds(AdmissionConfig(is_on=True, thresholds=BOTH))

    busy.set("m", Thresholds())

    assert busy.acting("m") is None
