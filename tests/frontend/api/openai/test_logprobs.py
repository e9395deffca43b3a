"""Log probabilities have OpenAI's two shapes, exact in bytes and offsets however the tokens are cut."""

import math

import msgspec
import pytest

from services.core.interface import TokenLogprobs
from services.frontend.api.openai.logprobs import LOGPROB_MIN, ChatLogprobs, CompletionLogprobs
from services.models.tokenizers.byte_level import EOS, ByteTokenizer

BYTES = ByteTokenizer.token_bytes
A, B, SNOW = ord("a"), ord("b"), "☃".encode()


def test_chat_has_an_entry_for_each_token_with_its_rivals() -> None:
    written = ChatLogprobs(BYTES).write([A, B], [TokenLogprobs(-0.5, ((A, -0.5), (B, -2.0))), TokenLogprobs(-1.0)])

    a = {"token": "a", "logprob": -0.5, "bytes": [97]}
    b = {"token": "b", "logprob": -2.0, "bytes": [98]}
    assert written == {
        "content": [a | {"top_logprobs": [a, b]}, b | {"logprob": -1.0, "top_logprobs": []}],
        "refusal": None,
    }


def test_half_a_character_is_shown_as_a_replacement_and_exact_in_bytes() -> None:
    written = ChatLogprobs(BYTES).write(list(SNOW), [TokenLogprobs(-1.0)] * 3)

    assert [entry["token"] for entry in written["content"]] == ["\ufffd"] * 3
    assert b"".join(bytes(entry["bytes"]) for entry in written["content"]) == SNOW


def test_a_token_without_text_is_empty() -> None:
    written = ChatLogprobs(BYTES).write([EOS], [TokenLogprobs(-1.0)])

    assert (written["content"][0]["token"], written["content"][0]["bytes"]) == ("", [])


def test_a_completion_has_four_lists() -> None:
    written = CompletionLogprobs(BYTES).write([A, B], [TokenLogprobs(-0.5, ((A, -0.5), (B, -2.0)))] * 2)

    assert written == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"a": -0.5, "b": -2.0}] * 2,
        "text_offset": [0, 1],
    }


def test_the_token_itself_is_always_among_the_top() -> None:
    written = CompletionLogprobs(BYTES).write([A, A], [TokenLogprobs(-3.0, ((B, -0.1),)), TokenLogprobs(-3.0)])

    assert written["top_logprobs"] == [{"b": -0.1, "a": -3.0}, {"a": -3.0}]
    assert list(written["top_logprobs"][0]) == ["b", "a"]


def test_of_rivals_that_look_alike_the_likelier_stands() -> None:
    written = CompletionLogprobs(BYTES).write([0xE2], [TokenLogprobs(-2.0, ((0xE3, -0.2), (0xE2, -2.0)))])

    assert written["top_logprobs"] == [{"\ufffd": -0.2}]


@pytest.mark.parametrize("cut", range(9))
def test_offsets_count_whole_characters_wherever_the_answer_is_cut(cut: int) -> None:
    tokens = [*"a☃é".encode(), 0xFF, B]
    writer = CompletionLogprobs(BYTES)

    pieces = [writer.write(part, [TokenLogprobs(-1.0)] * len(part)) for part in (tokens[:cut], tokens[cut:])]

    assert [offset for piece in pieces for offset in piece["text_offset"]] == [0, 1, 1, 1, 2, 2, 3, 4]


@pytest.mark.parametrize("logprob", [-math.inf, math.nan, -1e9])
def test_the_impossible_has_a_number_that_json_can_say(logprob: float) -> None:
    chat = ChatLogprobs(BYTES).write([A], [TokenLogprobs(logprob, ((B, logprob),))])
    completion = CompletionLogprobs(BYTES).write([A], [TokenLogprobs(logprob)])

    assert chat["content"][0]["logprob"] == chat["content"][0]["top_logprobs"][0]["logprob"] == LOGPROB_MIN
    assert completion["token_logprobs"] == [LOGPROB_MIN]
    assert b"null" not in msgspec.json.encode(completion)
