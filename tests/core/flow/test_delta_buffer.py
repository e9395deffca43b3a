"""DeltaBuffer: fewer, larger deltas have exactly the content of many small ones, and their size is known."""

import time

import pytest

from services.core.flow.delta_buffer import LOGPROB_BYTES, PIECE_BYTES_MAX, TOKEN_BYTES, DeltaBuffer
from services.core.interface import Delta, TokenLogprobs, Usage
from services.core.request import Continuation, FinishReason


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


def test_consecutive_deltas_of_a_choice_become_one() -> None:
    held = joined(Delta(5, [7], "a", choice=1), Delta(6, (8, 9), "bc", choice=1))

    assert popped(held) == [Delta(5, [7, 8, 9], "abc", 1)]


def test_a_delta_can_follow_one_that_was_popped() -> None:
    held = joined(Delta(5, [7], "a"))
    held.pop()

    held.add(Delta(6, [8], "b"))

    assert popped(held) == [Delta(6, [8], "b")]


def test_each_choice_is_joined_apart_with_its_log_probabilities_and_its_finish_reason() -> None:
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


def test_how_an_answer_continued_is_kept() -> None:
    buffer = joined(Delta(0, [1]), Delta(1, (), finish_reason=FinishReason.STOP, continuation=Continuation.PREFIX))

    assert buffer.pop().continuation is Continuation.PREFIX


def test_tokens_of_the_prompt_are_kept() -> None:
    buffer = DeltaBuffer()
    for position in (0, 1):
        buffer.add(Delta(position, [1], prompt_tokens=7))

    assert buffer.pop().prompt_tokens == 7


def test_the_delta_with_the_usage_comes_last_although_its_choice_began_first() -> None:
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


def test_added_deltas_are_not_changed() -> None:
    first = Delta(0, [7], "a", logprobs=[TokenLogprobs(-1.0)])

    joined(first, Delta(1, [8], "b", logprobs=[TokenLogprobs(-2.0)]))

    assert first == Delta(0, [7], "a", logprobs=[TokenLogprobs(-1.0)])


def test_a_gap_between_two_pieces_is_a_bug() -> None:
    held = joined(Delta(0, [7], "x" * PIECE_BYTES_MAX))

    with pytest.raises(AssertionError):
        held.add(Delta(2, [8]))


def test_nothing_is_added_to_a_piece_of_maximum_size() -> None:
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
def test_the_size_covers_tokens_texts_and_log_probabilities(delta: Delta, size: int) -> None:
    held = joined(delta)
    assert held.size == size

    held.pop()
    assert held.size == 0


def test_extreme_token_ids_and_lone_surrogates_are_preserved() -> None:
    held = joined(Delta(0, [2**32 - 1], "é\u2028"), Delta(1, [0], "\ud800"))

    assert popped(held) == [Delta(0, [2**32 - 1, 0], "é\u2028\ud800")]


def test_the_cost_of_a_token_does_not_grow_with_the_unread_text() -> None:
    """Bug: each token copied the whole text before it, so that 65,000 tokens blocked the event loop for seconds."""

    def joined_s(count: int) -> float:
        began = time.process_time()
        popped(joined(*(Delta(position, [7], "a text of some length " * 4) for position in range(count))))
        return time.process_time() - began

    joined_s(1000)

    assert joined_s(60_000) < 1.0
