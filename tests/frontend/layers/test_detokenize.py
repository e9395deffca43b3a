"""Detokenize delivers complete characters, ends the answer at a stop string, and counts the usage of all of it."""

import asyncio
import codecs
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.call import Call
from services.core.errors import Failure, Reason
from services.core.generation.cursor import Cursor
from services.core.interface import Delta, Finish, Sink, TokenLogprobs, Usage
from services.core.request import Continuation, FinishReason, Request
from services.frontend.layers.detokenize import Detokenize, Detokenizer
from services.models.tokenizers.byte_level import EOS, ByteTokenizer
from tests.support.doubles import (
    HANG,
    Collected,
    Script,
    Step,
    call_layer,
    make_kept,
    make_request,
    models_of,
    run_async,
)


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


def test_each_delta_has_the_tokens_of_the_prompt_if_the_call_asks() -> None:
    for counts_prompt, expected in ((False, {0}), (True, {2})):
        layer = Detokenize(Script([*tokens_of("hi"), FinishReason.STOP]), models_of())

        result = run_async(call_layer(layer, make_request(max_tokens=99), counts_prompt=counts_prompt))

        assert {delta.prompt_tokens for delta in result.deltas} == expected


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
    detokenizer = Detokenizer(collected, ByteTokenizer(), ("stop",))
    detokenizer.on_stopped = lambda: stopped.append("stopped")

    detokenizer.deliver(Delta(0, list(b"a stop")))
    detokenizer.deliver(Delta(6, list(b"!")))

    assert (collected.text, collected.token_ids) == ("a ", list(b"a stop"))
    assert (detokenizer.token_count, stopped) == (6, ["stopped"])


def test_last_delta_of_a_stopped_answer_has_log_probabilities_of_its_own_tokens_only() -> None:
    collected = Collected()
    detokenizer = Detokenizer(collected, ByteTokenizer(), ("stop",))

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


# Special tokens: in the text that is searched, and not in the text that is shown


END = ByteTokenizer.special_tokens[EOS]


@pytest.mark.parametrize(
    ("tokens", "stop", "text", "count"),
    [
        ([*b"ab", EOS, *b"cd"], END, "ab", 3),
        ([*b"ab", EOS, *b"cd"], "<|", "ab", 3),
        ([*b"ab", EOS, *b"cd"], f"b{END}", "a", 3),
        ([*b"ab", EOS, *b"cd"], f"{END}c", "ab", 4),
        ([*b"ab", EOS, *b"cd"], f"b{END}c", "a", 4),
        ([*b"ab", EOS, EOS, *b"cd"], END * 2, "ab", 4),
        ([*b"ab", EOS, *b"cd"], "bc", "abcd", 5),
        ([*b"ab", EOS, *b"cd"], f"{END}x", "abcd", 5),
        ([*END.encode(), *b"cd"], END, "", len(END)),
        (["漢".encode()[0], EOS, *"漢!".encode()[1:]], f"{END}漢", "", 4),
        (["漢".encode()[0], EOS, *"漢!".encode()[1:]], f"漢{END}", "漢!", 5),
    ],
)
def test_stop_string_is_found_in_the_text_with_special_tokens_spelled_out(
    tokens: list[int], stop: str, text: str, count: int
) -> None:
    """A bug: a special token has no text, so a string that spells it never stopped, and what followed was billed."""
    result = detokenize([*tokens], strings=(stop,))

    assert result.finish is not None
    assert (result.text, result.finish.usage) == (text, Usage(2, count))
    assert result.token_ids == tokens[:count]
    assert result.finish.reason is (FinishReason.LENGTH if count == len(tokens) else FinishReason.STOP)


def test_spelling_of_a_special_token_is_never_shown() -> None:
    """It is held back while it may begin a stop string, and dropped when it does not."""
    result = detokenize([*b"a", EOS, *b"b", EOS], strings=(f"{END}x", "bx"))

    assert [delta.text for delta in result.deltas] == ["a", "", "", "b", ""]


def test_continued_answer_may_end_with_a_stop_string_that_began_with_a_special_token() -> None:
    result = detokenize(tokens_of("c!"), strings=(f"{END}c",), generated_token_ids=(*b"ab", EOS))

    assert result.finish is not None
    assert (result.text, result.finish.reason, result.finish.usage) == ("", FinishReason.STOP, Usage(2, 4))


# min_tokens


@pytest.mark.parametrize(
    ("min_tokens", "strings", "text"),
    [
        (0, ("b",), "a"),
        (1, ("b",), "a"),
        (2, ("b",), "abca"),
        (6, ("b",), "abcabca"),
        (8, ("b",), "abcabcabc"),
        (2, ("bc",), "a"),
        (3, ("bc",), "abca"),
        (4, ("abc",), "abc"),
        (5, ("ca", "b"), "abcab"),
        (9, ("b", "c"), "abcabcabc"),
    ],
)
def test_stop_string_ends_the_answer_only_with_a_token_after_min_tokens(
    min_tokens: int, strings: tuple[str, ...], text: str
) -> None:
    """The meaning of vLLM: text of the first tokens completes no stop string, but may begin one."""
    single = detokenize(tokens_of("abcabcabc"), strings=strings, min_tokens=min_tokens)
    joined = detokenize([b"abcabcabc"], strings=strings, min_tokens=min_tokens)

    assert single.text == joined.text == text
    assert single.finish == joined.finish


def test_stop_string_that_spells_a_special_token_waits_for_min_tokens() -> None:
    result = detokenize([EOS, *b"a", EOS, *b"b"], strings=(END,), min_tokens=2)

    assert (result.text, result.token_ids) == ("a", [EOS, *b"a", EOS])


def test_min_tokens_counts_the_tokens_of_a_continued_answer() -> None:
    result = detokenize(tokens_of("bab"), strings=("b",), min_tokens=4, generated_token_ids=tuple(b"ba"))

    assert (result.text, result.token_ids) == ("ba", list(b"bab"))


def test_half_a_character_at_the_end_completes_a_stop_string_only_after_min_tokens() -> None:
    half = tokens_of("a漢")[:3]

    assert detokenize([*half], strings=("\ufffd",), min_tokens=2).text == "a"
    assert detokenize([*half], strings=("\ufffd",), min_tokens=3).text == "a\ufffd"


def test_continued_answer_may_contain_a_whole_stop_string() -> None:
    """A bug: a string that was complete before the answer continued ended the request with INTERNAL."""
    result = detokenize(tokens_of("p stop"), strings=("stop",), generated_token_ids=tuple(b"a stop."))

    assert result.text == "p "


@pytest.mark.parametrize(("min_tokens", "is_complete"), [(0, True), (5, True), (6, False)])
def test_answer_whose_last_token_completed_a_stop_string_is_complete(min_tokens: int, is_complete: bool) -> None:
    script = Script([*tokens_of("!"), FinishReason.LENGTH])
    request = make_request(
        max_tokens=99, strings=("stop",), generated_token_ids=tuple(b"a stop"), min_tokens=min_tokens
    )

    result = run_async(call_layer(Detokenize(script, models_of()), request))

    assert bool(script.requests) != is_complete
    assert result.finish is not None
    assert result.finish.reason is (FinishReason.STOP if is_complete else FinishReason.LENGTH)
    assert (result.text, result.finish.usage) == ("", Usage(2, 6)) if is_complete else ("!", Usage(2, 7))


@pytest.mark.parametrize("text", ["plain text", "a 漢字 é🎉", "sto st stop", "st", "ends with st"])
@pytest.mark.parametrize("strings", [(), ("stop",), ("top", "st s")])
def test_rest_of_an_answer_equals_the_rest_of_the_undisturbed_one_for_every_cut(
    text: str, strings: tuple[str, ...]
) -> None:
    whole = detokenize([*tokens_of(text), FinishReason.STOP], strings=strings)

    for cut in range(len(whole.token_ids) + 1):
        rest: list[Step] = [*whole.token_ids[cut:], FinishReason.STOP]
        continued = detokenize(rest, strings=strings, generated_token_ids=tuple(whole.token_ids[:cut]))

        assert continued.deltas == [delta for delta in whole.deltas if delta.position >= cut], f"cut at {cut}"
        assert continued.finish == whole.finish


@pytest.mark.parametrize("strings", [(), ("stop",)])
def test_how_an_answer_continued_is_told_with_its_end_alone(strings: tuple[str, ...]) -> None:
    class Moving:
        async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
            sink.deliver(Delta(0, [97]))
            sink.deliver(Delta(1, (), continuation=Continuation.PREFIX))
            sink.deliver(Delta(1, list(b"stop")))
            return Finish(FinishReason.LENGTH)

    result = run_async(call_layer(Detokenize(Moving(), models_of()), make_request(strings=strings)))

    assert [(delta.position, delta.continuation) for delta in result.deltas] == [
        (0, None),
        (1, None),
        (5, Continuation.PREFIX),
    ]


# The whole rule


class Odd:
    """A vocabulary with parts of characters, and with special tokens that look like text."""

    token_bytes = (b"a", b"b", b"ab", b"ba", "é".encode()[:1], "é".encode()[1:], b"", b"", b"", b"\xff")
    special_tokens: Mapping[int, str] = {6: "<a>", 7: "b"}


def searched(tokens: Sequence[int]) -> list[tuple[str, bool, int]]:
    """Each character that is searched, whether it is shown, and how many tokens there are when it is complete."""
    decoder, characters = codecs.getincrementaldecoder("utf-8")(errors="replace"), []
    for count, token in enumerate(tokens, start=1):
        if content := Odd.token_bytes[token]:
            characters += [(character, True, count) for character in decoder.decode(content)]
        else:
            characters += [(character, False, count) for character in Odd.special_tokens.get(token, "")]
    return characters + [(character, True, len(tokens)) for character in decoder.decode(b"", final=True)]


def expected(tokens: Sequence[int], strings: Sequence[str], min_tokens: int) -> tuple[str, int, bool]:
    """The text shown, the number of tokens and whether a string stops, from a search in the whole text."""
    characters = searched(tokens)
    whole = "".join(character for character, _, _ in characters)
    for end in range(1, len(whole) + 1):
        found = [string for string in strings if whole[:end].endswith(string)]
        if found and characters[end - 1][2] > min_tokens:
            kept = characters[: end - max(map(len, found))]
            return "".join(character for character, shown, _ in kept if shown), characters[end - 1][2], True
    return "".join(character for character, shown, _ in characters if shown), len(tokens), False


@settings(max_examples=500)
@given(
    st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=6),
    st.lists(st.text(alphabet="ab<>é\ufffd", min_size=1, max_size=5), min_size=1, max_size=3),
    st.integers(0, 8),
)
def test_answer_is_the_one_that_a_search_in_the_whole_text_gives(
    deltas: list[list[int]], strings: list[str], min_tokens: int
) -> None:
    tokens, collected = [token for delta in deltas for token in delta], Collected()
    detokenizer, position = Detokenizer(collected, Odd(), strings, min_tokens), 0

    for delta in deltas:
        detokenizer.deliver(Delta(position, delta))
        position += len(delta)
    finish = detokenizer.finish(make_request(), FinishReason.LENGTH)

    text, count, is_stopped = expected(tokens, strings, min_tokens)
    assert (collected.text, collected.token_ids) == (text, tokens[:count])
    assert finish == Finish(FinishReason.STOP if is_stopped else FinishReason.LENGTH, Usage(2, count))


# Answers that are resumed


def resumed(*positions: int, choice: int = 0, logprobs: bool = False) -> list[tuple[int, str]]:
    """(position, text) of the deltas of an answer of 4 tokens and then 2, whose client has so many of each choice."""

    async def below(request: Request, call: Call, sink: Sink) -> Finish:
        for position, text in ((0, b"abcd"), (4, b"ef")):
            values = [TokenLogprobs(-float(token)) for token in text] if logprobs else None
            sink.deliver(Delta(position, list(text), choice=request.choice, logprobs=values))
        return Finish(FinishReason.LENGTH)

    kept = make_kept(first_index=1, cursor=Cursor(positions, (False,) * len(positions), 0))
    request = make_request(choice=choice, logprobs=0 if logprobs else None)
    result = run_async(call_layer(Detokenize(below, models_of()), request, kept=kept))
    for delta in result.deltas if logprobs else ():
        assert [-one.logprob for one in delta.logprobs or ()] == list(delta.token_ids)
    assert result.text == "abcdef"
    return [(delta.position, delta.text) for delta in result.deltas if delta.token_ids]


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize(
    ("position", "deltas"),
    [
        (0, [(0, "abcd"), (4, "ef")]),
        (1, [(0, "a"), (1, "bcd"), (4, "ef")]),
        (3, [(0, "abc"), (3, "d"), (4, "ef")]),
        (4, [(0, "abcd"), (4, "ef")]),
        (5, [(0, "abcd"), (4, "e"), (5, "f")]),
        (6, [(0, "abcd"), (4, "ef")]),
        (99, [(0, "abcd"), (4, "ef")]),
    ],
)
def test_deltas_are_cut_where_the_client_stands(position: int, deltas: list[tuple[int, str]], logprobs: bool) -> None:
    assert resumed(7, position, logprobs=logprobs) == deltas


def test_each_choice_is_cut_at_its_own_position() -> None:
    assert resumed(7, 1, 3, choice=1) == [(0, "abc"), (3, "d"), (4, "ef")]


def test_choice_that_the_cursor_does_not_name_is_not_cut() -> None:
    assert resumed(7, 1, choice=1) == [(0, "abcd"), (4, "ef")]


def test_character_that_the_client_has_a_part_of_comes_with_its_last_byte() -> None:
    async def below(request: Request, call: Call, sink: Sink) -> Finish:
        sink.deliver(Delta(0, list("漢".encode())))
        return Finish(FinishReason.LENGTH)

    kept = make_kept(cursor=Cursor((1,), (False,), 0))
    result = run_async(call_layer(Detokenize(below, models_of()), make_request(), kept=kept))

    assert [(delta.position, delta.text) for delta in result.deltas] == [(0, ""), (1, "漢"), (3, "")]


def test_layers_below_learn_that_a_stop_string_has_ended_a_kept_answer() -> None:
    stopped: list[bool] = []

    async def below(request: Request, call: Call, sink: Sink) -> Finish:
        assert call.kept is not None
        assert call.kept.is_stopped is not None
        for position, token in enumerate(b"ab"):
            stopped.append(call.kept.is_stopped())
            sink.deliver(Delta(position, [token]))
        stopped.append(call.kept.is_stopped())
        await asyncio.Event().wait()
        raise AssertionError("cancelled")

    request = make_request(strings=("b",))
    run_async(call_layer(Detokenize(below, models_of()), request, kept=make_kept()))

    assert stopped == [False, False, True]
