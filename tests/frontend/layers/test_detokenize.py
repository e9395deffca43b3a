"""Present: whole characters, nothing of a stop string, and the usage of the whole answer."""

import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.errors import Failure, Reason
from services.core.interface import Usage
from services.core.request import FinishReason
from services.frontend.layers.detokenize import Detokenize
from services.frontend.layers.stop_strings import StopStrings
from tests.support.doubles import HANG, Collected, Script, Step, call_layer, make_request, models_of, run_async


def present(take: list[Step], **request: Any) -> Collected:
    script = Script(take)
    return run_async(call_layer(Detokenize(script, models_of()), make_request(max_tokens=99, **request)))


def take_of(text: str) -> list[Step]:
    return list(text.encode())


def test_gives_each_token_its_text() -> None:
    result = present([*take_of("hi"), FinishReason.STOP])

    assert [(delta.position, list(delta.token_ids), delta.text) for delta in result.deltas] == [
        (0, [104], "h"),
        (1, [105], "i"),
        (2, [], ""),
    ]


def test_its_last_delta_says_why_the_answer_ended_and_what_was_used() -> None:
    result = present([*take_of("hi"), FinishReason.STOP])

    assert [(delta.finish_reason, delta.usage) for delta in result.deltas] == [
        (None, None),
        (None, None),
        (FinishReason.STOP, Usage(2, 2)),
    ]


def test_holds_half_a_character_back_until_it_is_whole() -> None:
    result = present(take_of("漢!"))

    assert [delta.text for delta in result.deltas] == ["", "", "漢", "!", ""]


@given(st.lists(st.sampled_from(b"a\n\xe6\xbc\xa2\xff\xf0\x9f"), max_size=8).map(bytes))
def test_shows_of_any_bytes_what_they_are_as_a_whole(encoded: bytes) -> None:
    assert present(list(encoded)).text == encoded.decode(errors="replace")


def test_shows_half_a_character_as_such_when_nothing_more_comes() -> None:
    assert present(take_of("漢")[:2]).text == "\ufffd"


def test_counts_usage_over_the_whole_answer() -> None:
    result = present(take_of("hi"), prompt=(1, 2, 3), generated_token_ids=(97, 98))

    assert result.finish is not None
    assert result.finish.usage == Usage(prompt_tokens=3, completion_tokens=4)


def test_a_stop_string_ends_the_answer_before_it_and_the_engine_at_once() -> None:
    script = Script([*take_of("one stop"), HANG])

    result = run_async(call_layer(Detokenize(script, models_of()), make_request(strings=("stop",), max_tokens=99)))

    assert result.text == "one "
    assert result.finish is not None
    assert result.finish.reason is FinishReason.STOP
    assert script.cancelled_count == 1


def test_tokens_after_the_stop_string_reach_nobody_and_are_not_billed() -> None:
    joined = present([b"one stop and more"], strings=("stop",))
    single = present(take_of("one stop and more"), strings=("stop",))

    assert joined.token_ids == single.token_ids == list(b"one stop")
    assert joined.finish == single.finish
    assert single.finish is not None
    assert single.finish.usage == Usage(2, 8)


def test_the_first_stop_string_in_the_text_counts() -> None:
    assert present([b"abcdef"], strings=("ef", "cd")).text == "ab"


def test_holds_back_what_may_become_a_stop_string_and_releases_what_did_not() -> None:
    result = present(take_of("so stout"), strings=("stop",))

    assert [delta.text for delta in result.deltas] == ["", "so", " ", "", "", "", "stou", "t", ""]


def test_releases_what_was_held_back_at_the_end() -> None:
    result = present([*take_of("a sto"), FinishReason.LENGTH], strings=("stop",))

    assert result.text == "a sto"
    assert result.finish is not None
    assert result.finish.reason is FinishReason.LENGTH


def test_a_continued_answer_may_end_with_a_stop_string_that_began_before() -> None:
    result = present(take_of("op!"), strings=("stop",), generated_token_ids=tuple(b"a st"))

    assert result.finish is not None
    assert (result.text, result.finish.reason) == ("", FinishReason.STOP)


def test_a_continued_answer_may_begin_with_the_rest_of_a_character() -> None:
    half, rest = tuple("漢".encode())[:2], list("漢".encode())[2:]

    assert present([*rest], generated_token_ids=half).text == "漢"


def test_passes_failures_on_even_a_timeout_of_its_own() -> None:
    with pytest.raises(TimeoutError):
        present([TimeoutError("not ours")])
    with pytest.raises(Failure) as caught:
        present([7, Reason.DISCONNECTED])
    assert caught.value.reason is Reason.DISCONNECTED


def test_knows_only_models_that_a_worker_has_had() -> None:
    with pytest.raises(Failure) as caught:
        present([7], model="other")
    assert caught.value.reason is Reason.MODEL_NOT_FOUND


def test_of_two_strings_that_end_together_the_longer_counts() -> None:
    assert StopStrings(["cd", "bcd"]).feed("abcde") == ("a", True)


def test_a_long_string_that_nearly_comes_costs_no_more_than_a_short_one() -> None:
    """A bug: each token was compared with every beginning of every string, for tens of milliseconds."""
    stops = StopStrings(["a" * 1023 + chr(0x100 + number) for number in range(16)])
    steps = 0

    def count(frame: Any, event: str, _: Any) -> Any:
        nonlocal steps
        steps += event == "line"
        return count

    stops.feed("a" * 1023)
    sys.settrace(count)
    try:
        stops.feed("a" * 100)
    finally:
        sys.settrace(None)

    assert steps < 100 * 16 * 20


@given(st.text(alphabet="abc", max_size=30), st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3))
def test_stop_strings_do_not_depend_on_how_the_text_is_cut(text: str, strings: list[str]) -> None:
    _, whole_stopped = StopStrings(strings).feed(text)
    pieces, shown = StopStrings(strings), ""

    for character in text:
        piece, stopped = pieces.feed(character)
        shown += piece
        if stopped:
            break
    else:
        stopped = False

    assert stopped == whole_stopped
    if stopped:
        assert not any(string in shown for string in strings)
    else:
        assert shown + pieces.flush() == text
