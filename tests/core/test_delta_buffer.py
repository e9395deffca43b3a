"""Joining: fewer and larger deltas say exactly what many small ones did, and their size is known."""

import time

import pytest

from services.core.delta_buffer import LOGPROB_BYTES, PIECE_BYTES_MAX, TOKEN_BYTES, DeltaBuffer
from services.core.interface import Delta, TokenLogprobs, Usage
from services.core.request import FinishReason


def joined(*deltas: Delta) -> DeltaBuffer:
    held = DeltaBuffer()
    for delta in deltas:
        held.add(delta)
    return held


def popped(held: DeltaBuffer) -> list[Delta]:
    deltas = []
    while held:
        deltas.append(held.pop())
    return deltas


def test_what_follows_in_a_choice_is_one_delta() -> None:
    held = joined(Delta(5, [7], "a", choice=1), Delta(6, (8, 9), "bc", choice=1))

    assert popped(held) == [Delta(5, [7, 8, 9], "abc", 1)]


def test_it_goes_on_where_what_was_taken_ended() -> None:
    held = joined(Delta(5, [7], "a"))
    held.pop()

    held.add(Delta(6, [8], "b"))

    assert popped(held) == [Delta(6, [8], "b")]


def test_choices_are_joined_each_for_itself_with_log_probabilities_and_the_end() -> None:
    held = joined(
        Delta(0, [7], "a", 1, [TokenLogprobs(-1.0)]),
        Delta(0, [8], "b", 0, [TokenLogprobs(-2.0)]),
        Delta(1, [9], "c", 0, [TokenLogprobs(-3.0)]),
        Delta(1, (), "!", 1, finish_reason=FinishReason.STOP),
    )

    assert popped(held) == [
        Delta(0, [7], "a!", 1, [TokenLogprobs(-1.0)], FinishReason.STOP),
        Delta(0, [8, 9], "bc", 0, [TokenLogprobs(-2.0), TokenLogprobs(-3.0)]),
    ]


def test_the_usage_comes_last_of_all_though_its_choice_began_first() -> None:
    held = joined(
        Delta(0, [7], "a", 1),
        Delta(0, [8], "b", 0),
        Delta(1, (), "", 0, finish_reason=FinishReason.STOP),
        Delta(1, (), "", 1, finish_reason=FinishReason.STOP, usage=Usage(2, 2)),
    )

    assert popped(held) == [
        Delta(0, [8], "b", 0, finish_reason=FinishReason.STOP),
        Delta(0, [7], "a", 1, finish_reason=FinishReason.STOP, usage=Usage(2, 2)),
    ]


def test_nothing_of_what_was_handed_over_changes() -> None:
    first = Delta(0, [7], "a", logprobs=[TokenLogprobs(-1.0)])

    joined(first, Delta(1, [8], "b", logprobs=[TokenLogprobs(-2.0)]))

    assert first == Delta(0, [7], "a", logprobs=[TokenLogprobs(-1.0)])


def test_a_gap_is_a_bug_also_between_two_pieces() -> None:
    held = joined(Delta(0, [7], "x" * PIECE_BYTES_MAX))

    with pytest.raises(AssertionError):
        held.add(Delta(2, [8]))


def test_a_piece_takes_no_more_once_it_is_large() -> None:
    text = "x" * (PIECE_BYTES_MAX // 2)
    held = joined(*(Delta(position, [7], text) for position in range(5)))

    pieces = popped(held)

    assert [piece.position for piece in pieces] == [0, 2, 4]
    assert "".join(piece.text for piece in pieces) == text * 5
    assert [len(piece.token_ids) for piece in pieces] == [2, 2, 1]


@pytest.mark.parametrize(
    ("delta", "size"),
    [
        (Delta(0, [], ""), 0),
        (Delta(0, [7, 8], ""), 2 * TOKEN_BYTES),
        (Delta(0, [], "aé€😀"), 1 + 2 + 3 + 4),
        (Delta(0, [7], "", logprobs=[TokenLogprobs(-1.0, ((1, -2.0), (2, -3.0)))]), TOKEN_BYTES + 3 * LOGPROB_BYTES),
    ],
    ids=["nothing", "tokens", "text", "log probabilities"],
)
def test_the_size_is_that_of_all_that_is_held(delta: Delta, size: int) -> None:
    held = joined(delta)
    assert held.size == size

    held.pop()
    assert held.size == 0


def test_tokens_and_texts_of_every_kind_come_out_as_they_went_in() -> None:
    held = joined(Delta(0, [2**32 - 1], "é\u2028"), Delta(1, [0], "\ud800"))

    assert popped(held) == [Delta(0, [2**32 - 1, 0], "é\u2028\ud800")]


def test_joining_costs_the_same_for_each_token_however_much_is_unread() -> None:
    """Once each token copied the whole text before it: 65,000 of them held up the loop for seconds."""

    def joined_s(count: int) -> float:
        began = time.process_time()
        popped(joined(*(Delta(position, [7], "a text of some length " * 4) for position in range(count))))
        return time.process_time() - began

    joined_s(1000)

    assert joined_s(60_000) < 1.0
