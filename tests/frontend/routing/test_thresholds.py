"""Thresholds: a worker is busy if every known rank strictly exceeds one, and admission control is on."""

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
def test_a_rank_is_busy_only_strictly_above_the_threshold_of_blocks(
    used: int, total: int, threshold: float, expected: bool
) -> None:
    rank = replace(IDLE, kv_blocks_used=used, kv_blocks_total=total)

    assert is_busy([rank], Thresholds(active_decode_blocks=threshold)) is expected


@pytest.mark.parametrize(("tokens", "threshold", "expected"), [(10, 10, False), (11, 10, True), (1, 0, True)])
def test_a_rank_is_busy_only_strictly_above_the_threshold_of_prefill_tokens(
    tokens: int, threshold: int, expected: bool
) -> None:
    rank = replace(IDLE, active_prefill_tokens=tokens)

    assert is_busy([rank], Thresholds(active_prefill_tokens=threshold)) is expected


@pytest.mark.parametrize("busy", [{"kv_blocks_used": 51}, {"active_prefill_tokens": 11}])
def test_a_rank_over_one_of_two_thresholds_is_busy(busy: dict[str, int]) -> None:
    assert is_busy([replace(IDLE, **busy)], BOTH)


def test_a_worker_is_busy_if_each_rank_exceeds_some_threshold() -> None:
    by_blocks, by_tokens = replace(IDLE, kv_blocks_used=51), replace(IDLE, active_prefill_tokens=11)

    assert is_busy([by_blocks, by_tokens], BOTH)
    assert not is_busy([by_blocks, IDLE], BOTH)


def test_a_worker_without_a_known_rank_is_not_busy() -> None:
    assert not is_busy([], Thresholds(active_decode_blocks=0.0, active_prefill_tokens=0))


def test_no_rank_is_busy_without_thresholds() -> None:
    assert not is_busy([RankLoad(100, 100, 10**9)], Thresholds())


def test_excess_names_each_threshold_that_the_least_loaded_rank_exceeds() -> None:
    thresholds = Thresholds(active_decode_blocks=0.25, active_prefill_tokens=100)
    ranks = [RankLoad(9, 9, 900), RankLoad(3, 9, 101), RankLoad(4, 9, 0)]

    blocks, tokens = (
        "active_decode_blocks 0.3333 (3 of 9), above the threshold of 0.25",
        "active_prefill_tokens 101, above the threshold of 100",
    )
    assert excess(ranks, thresholds) == f"{blocks}, {tokens}"
    assert excess(ranks[1:2], Thresholds(active_prefill_tokens=100)) == tokens
    assert excess(ranks[2:], thresholds).endswith("(4 of 9), above the threshold of 0.25")


def test_set_thresholds_are_named_as_clients_name_them() -> None:
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
def test_a_threshold_out_of_range_is_an_invalid_argument_under_its_client_name(field: str, value: Any) -> None:
    with pytest.raises(Failure) as caught:
        Thresholds(**{field: value})

    assert (caught.value.reason, caught.value.param) == (Reason.INVALID_ARGUMENT, f"{field}_threshold")


@pytest.mark.parametrize("edge", [0, 1])
def test_the_ends_of_the_range_are_valid_thresholds(edge: int) -> None:
    assert Thresholds(active_decode_blocks=edge, active_prefill_tokens=edge).active_decode_blocks == edge


def test_thresholds_set_for_a_model_count_at_once_and_for_that_model_only() -> None:
    busy, lower = BusyThresholds(AdmissionConfig(is_on=True, thresholds=BOTH)), Thresholds(active_decode_blocks=0.4)

    busy.set("m", lower)

    assert (busy.of("m"), busy.of("other")) == (lower, BOTH)
    assert (busy.acting("m"), busy.acting("other")) == (lower, BOTH)


def test_thresholds_can_be_set_without_admission_control_but_do_not_act() -> None:
    busy, low = BusyThresholds(AdmissionConfig()), Thresholds(active_decode_blocks=0.1)

    busy.set("m", low)

    assert (busy.is_on, busy.of("m"), busy.acting("m")) == (False, low, None)


def test_no_threshold_acts_on_a_model_whose_thresholds_were_removed() -> None:
    busy = BusyThresholds(AdmissionConfig(is_on=True, thresholds=BOTH))

    busy.set("m", Thresholds())

    assert busy.acting("m") is None
