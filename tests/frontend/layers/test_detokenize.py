"""Detokenize delivers complete characters, ends the answer at a stop string, and counts the usage of all of it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.errors import Failure, Reason
from services.core.interface import Delta, TokenLogprobs, Usage
from services.core.request import FinishReason
from services.frontend.layers.detokenize import Detokenize, Detokenizer
from tests.support.doubles import HANG, Collected, Script, Step, call_layer, make_request, models_of, run_async


def detokenize(steps: list[Step], **request: Any) -> Collected:
    script = Script(steps)
    return run_async(call_layer(Detokenize(script, models_of()), make_request(max_tokens=99, **request)))


def tokens_of(text: str) -> list[Step]:
    return list(text.encode())


def test_each_token_gets_its_text() -> None:
    result = detokenize([*tokens_of("hi"), FinishReason.STOP])

    assert [(delta.position, list(delta.token_ids), delta.text) for delta in result.deltas] == [
        (0, [104], "h"),
        (1, [105], "i"),
        (2, [], ""),
    ]


def test_last_delta_has_the_finish_reason_and_the_usage() -> None:
    result = detokenize([*tokens_of("hi"), FinishReason.STOP])

    assert [(delta.finish_reason, delta.usage) for delta in result.deltas] == [
        (None, None),
        (None, None),
        (FinishReason.STOP, Usage(2, 2)),
    ]


def test_incomplete_character_is_held_back_until_it_is_complete() -> None:
    result = detokenize(tokens_of("漢!"))

    assert [delta.text for delta in result.deltas] == ["", "", "漢", "!", ""]


@given(st.lists(st.sampled_from(b"a\n\xe6\xbc\xa2\xff\xf0\x9f"), max_size=8).map(bytes))
def test_text_equals_the_decoded_bytes_of_the_whole_answer(encoded: bytes) -> None:
    assert detokenize(list(encoded)).text == encoded.decode(errors="replace")


def test_incomplete_character_at_the_end_is_shown_as_a_replacement_character() -> None:
    assert detokenize(tokens_of("漢")[:2]).text == "\ufffd"


def test_usage_counts_the_whole_answer_including_earlier_attempts() -> None:
    result = detokenize(tokens_of("hi"), prompt=(1, 2, 3), generated_token_ids=(97, 98))

    assert result.finish is not None
    assert result.finish.usage == Usage(prompt_tokens=3, completion_tokens=4)


def test_stop_string_ends_the_answer_before_it_and_cancels_the_engine() -> None:
    script = Script([*tokens_of("one stop"), HANG])

    result = run_async(call_layer(Detokenize(script, models_of()), make_request(strings=("stop",), max_tokens=99)))

    assert result.text == "one "
    assert result.finish is not None
    assert result.finish.reason is FinishReason.STOP
    assert script.cancelled_count == 1


def test_tokens_after_the_stop_string_are_not_delivered_and_not_billed() -> None:
    joined = detokenize([b"one stop and more"], strings=("stop",))
    single = detokenize(tokens_of("one stop and more"), strings=("stop",))

    assert joined.token_ids == single.token_ids == list(b"one stop")
    assert joined.finish == single.finish
    assert single.finish is not None
    assert single.finish.usage == Usage(2, 8)


def test_tokens_that_arrive_before_the_engine_is_cancelled_are_dropped() -> None:
    collected, stopped = Collected(), []
    detokenizer = Detokenizer(collected, [bytes([value]) for value in range(256)], ("stop",))
    detokenizer.on_stopped = lambda: stopped.append("stopped")

    detokenizer.deliver(Delta(0, list(b"a stop")))
    detokenizer.deliver(Delta(6, list(b"!")))

    assert (collected.text, collected.token_ids) == ("a ", list(b"a stop"))
    assert (detokenizer.token_count, stopped) == (6, ["stopped"])


def test_last_delta_of_a_stopped_answer_has_log_probabilities_of_its_own_tokens_only() -> None:
    collected = Collected()
    detokenizer = Detokenizer(collected, [bytes([value]) for value in range(256)], ("stop",))

    detokenizer.deliver(Delta(0, list(b"stop!"), logprobs=[TokenLogprobs(-float(number)) for number in range(5)]))

    assert [one.logprob for one in collected.deltas[0].logprobs or ()] == [0.0, -1.0, -2.0, -3.0]


def test_first_stop_string_in_the_text_ends_it() -> None:
    assert detokenize([b"abcdef"], strings=("ef", "cd")).text == "ab"


def test_possible_start_of_a_stop_string_is_held_back_and_released_if_it_is_none() -> None:
    result = detokenize(tokens_of("so stout"), strings=("stop",))

    assert [delta.text for delta in result.deltas] == ["", "so", " ", "", "", "", "stou", "t", ""]


def test_text_held_back_is_released_at_the_end() -> None:
    result = detokenize([*tokens_of("a sto"), FinishReason.LENGTH], strings=("stop",))

    assert result.text == "a sto"
    assert result.finish is not None
    assert result.finish.reason is FinishReason.LENGTH


def test_continued_answer_may_end_with_a_stop_string_that_began_before() -> None:
    result = detokenize(tokens_of("op!"), strings=("stop",), generated_token_ids=tuple(b"a st"))

    assert result.finish is not None
    assert (result.text, result.finish.reason) == ("", FinishReason.STOP)


def test_continued_answer_may_begin_with_the_rest_of_a_character() -> None:
    half, rest = tuple("漢".encode())[:2], list("漢".encode())[2:]

    assert detokenize([*rest], generated_token_ids=half).text == "漢"


def test_failures_are_passed_on_including_a_timeout_error() -> None:
    with pytest.raises(TimeoutError):
        detokenize([TimeoutError("not ours")])
    with pytest.raises(Failure) as caught:
        detokenize([7, Reason.DISCONNECTED])
    assert caught.value.reason is Reason.DISCONNECTED


def test_detokenize_refuses_an_unknown_model() -> None:
    with pytest.raises(Failure) as caught:
        detokenize([7], model="other")
    assert caught.value.reason is Reason.MODEL_NOT_FOUND
