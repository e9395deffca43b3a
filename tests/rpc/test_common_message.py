"""The bytes that are made without protobuf are those of the message that protobuf makes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.interface import Delta, TokenLogprobs, Usage
from services.core.request import Continuation, FinishReason
from services.rpc.codec import delta_to_wire
from services.rpc.common_message import common_message

NUMBERS = st.one_of(st.integers(0, 2**32 - 1), st.sampled_from([0, 127, 128, 16_383, 16_384, 2**21 - 1, 2**21]))


@given(NUMBERS, st.lists(NUMBERS, max_size=5), st.text(max_size=300), NUMBERS)
def test_bytes_are_those_of_protobuf(position: int, token_ids: list[int], text: str, choice: int) -> None:
    text = text.encode(errors="ignore").decode()
    delta = Delta(position, token_ids, text, choice)

    encoded = common_message(delta)

    assert encoded == (delta_to_wire(delta).SerializeToString() if text.isascii() else None)


@pytest.mark.parametrize(
    "delta",
    [
        Delta(0, [1], "a", 0, [TokenLogprobs(-1.0, ())]),
        Delta(0, [1], "a", 0, finish_reason=FinishReason.STOP),
        Delta(0, [1], "a", 0, usage=Usage(1, 1)),
        Delta(0, [1], "a", 0, continuation=Continuation.PREFIX),
    ],
)
def test_delta_with_more_is_left_to_protobuf(delta: Delta) -> None:
    assert common_message(delta) is None
