"""Recorder: passes tokens on unchanged, and records them while another worker may have to continue after them."""

import pytest

from services.core.interface import Delta
from services.frontend.migration.recorder import Recorder
from tests.support.doubles import Collected, make_request


class Case:
    """A recorder over a sink, for a prompt of two tokens."""

    def __init__(self, seq_len_max: int | None = None, generated: tuple[int, ...] = ()) -> None:
        self.collected = Collected()
        self.exceeded_count = 0
        request = make_request(prompt=(1, 2), generated_token_ids=generated)
        self.record = Recorder(self.collected, request, seq_len_max, self._on_exceeded)

    def _on_exceeded(self) -> None:
        self.exceeded_count += 1

    def deliver(self, *token_ids: int) -> None:
        self.record.deliver(Delta(self.record.position, token_ids))


def test_tokens_are_passed_on_and_recorded() -> None:
    case = Case()

    case.deliver(7, 8)
    case.deliver(9)

    assert case.collected.token_ids == list(case.record.token_ids) == [7, 8, 9]
    assert (case.record.count, case.record.position) == (3, 3)


def test_the_position_counts_the_tokens_that_the_request_brings_and_the_count_does_not() -> None:
    case = Case(generated=(5, 6))

    case.deliver(7)

    assert (case.record.count, case.record.position) == (1, 3)
    assert list(case.record.token_ids) == [7]


def test_a_gap_between_positions_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="tokens start at position 1, expected 0"):
        Case().record.deliver(Delta(1, [7]))


def test_above_seq_len_max_recording_stops_and_frees_its_tokens_while_delivery_goes_on() -> None:
    case = Case(seq_len_max=4)

    case.deliver(7, 8)
    assert case.record.is_tracking
    case.deliver(9)
    case.deliver(10)

    assert not case.record.is_tracking
    assert list(case.record.token_ids) == []
    assert case.exceeded_count == 1
    assert case.collected.token_ids == [7, 8, 9, 10]


@pytest.mark.parametrize(("seq_len_max", "is_tracking"), [(4, True), (3, False)])
def test_tokens_that_the_request_brings_count_towards_seq_len_max(seq_len_max: int, is_tracking: bool) -> None:
    assert Case(seq_len_max, generated=(5, 6)).record.is_tracking == is_tracking


def test_the_callback_runs_once_before_the_next_token_and_not_if_it_is_removed() -> None:
    case = Case()
    counts: list[int] = []

    case.record.on_next(lambda: counts.append(len(case.collected.deltas)))
    case.deliver(7)
    case.deliver(8)
    case.record.on_next(lambda: counts.append(-1))
    case.record.on_next(None)
    case.deliver(9)

    assert counts == [0]
