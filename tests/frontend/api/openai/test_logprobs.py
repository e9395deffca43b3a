"""Log probabilities have OpenAI's two formats, with exact bytes and offsets however the tokens are split."""

import math

import msgspec
import pytest

from services.core.interface import TokenLogprobs
from services.frontend.api.openai.logprobs import LOGPROB_MIN, ChatLogprobsWriter, CompletionLogprobsWriter
from services.models.tokenizers.byte_level import EOS, ByteTokenizer

BYTES = ByteTokenizer.token_bytes
A, B, SNOW = ord("a"), ord("b"), "☃".encode()


def test_chat_has_an_entry_for_each_token_with_its_top_logprobs() -> None:
    logprobs = [TokenLogprobs(-0.5, ((A, -0.5), (B, -2.0))), TokenLogprobs(-1.0)]

    written = msgspec.to_builtins(ChatLogprobsWriter(BYTES).write([A, B], logprobs))

    a = {"token": "a", "logprob": -0.5, "bytes": [97]}
    b = {"token": "b", "logprob": -2.0, "bytes": [98]}
    assert written == {
        "content": [a | {"top_logprobs": [a, b]}, b | {"logprob": -1.0, "top_logprobs": []}],
        "refusal": None,
    }


def test_chat_token_that_is_part_of_a_character_has_a_replacement_text_and_exact_bytes() -> None:
    written = ChatLogprobsWriter(BYTES).write(list(SNOW), [TokenLogprobs(-1.0)] * 3)

    assert [entry.token for entry in written.content] == ["\ufffd"] * 3
    assert b"".join(bytes(entry.bytes) for entry in written.content) == SNOW


def test_chat_token_without_text_has_an_empty_text_and_no_bytes() -> None:
    written = ChatLogprobsWriter(BYTES).write([EOS], [TokenLogprobs(-1.0)])

    assert (written.content[0].token, written.content[0].bytes) == ("", [])


def test_completion_has_four_lists() -> None:
    logprobs = [TokenLogprobs(-0.5, ((A, -0.5), (B, -2.0)))] * 2

    written = msgspec.to_builtins(CompletionLogprobsWriter(BYTES).write([A, B], logprobs))

    assert written == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"a": -0.5, "b": -2.0}] * 2,
        "text_offset": [0, 1],
    }


def test_completion_lists_the_token_itself_among_its_top_logprobs() -> None:
    logprobs = [TokenLogprobs(-3.0, ((B, -0.1),)), TokenLogprobs(-3.0)]

    written = CompletionLogprobsWriter(BYTES).write([A, A], logprobs)

    assert written.top_logprobs == [{"b": -0.1, "a": -3.0}, {"a": -3.0}]
    assert list(written.top_logprobs[0]) == ["b", "a"]


def test_completion_keeps_the_likelier_of_two_tokens_with_the_same_text() -> None:
    written = CompletionLogprobsWriter(BYTES).write([0xE2], [TokenLogprobs(-2.0, ((0xE3, -0.2), (0xE2, -2.0)))])

    assert written.top_logprobs == [{"\ufffd": -0.2}]


@pytest.mark.parametrize("cut", range(9))
def test_completion_offsets_count_whole_characters_wherever_the_answer_is_split(cut: int) -> None:
    tokens = [*"a☃é".encode(), 0xFF, B]
    writer = CompletionLogprobsWriter(BYTES)

    parts = [writer.write(part, [TokenLogprobs(-1.0)] * len(part)) for part in (tokens[:cut], tokens[cut:])]

    assert [offset for part in parts for offset in part.text_offset] == [0, 1, 1, 1, 2, 2, 3, 4]


@pytest.mark.parametrize("logprob", [-math.inf, math.nan, -1e9])
def test_infinite_and_undefined_log_probabilities_become_the_least_number(logprob: float) -> None:
    chat = ChatLogprobsWriter(BYTES).write([A], [TokenLogprobs(logprob, ((B, logprob),))])
    completion = CompletionLogprobsWriter(BYTES).write([A], [TokenLogprobs(logprob)])

    assert chat.content[0].logprob == chat.content[0].top_logprobs[0].logprob == LOGPROB_MIN
    assert completion.token_logprobs == [LOGPROB_MIN]
    assert b"null" not in msgspec.json.encode(completion)
