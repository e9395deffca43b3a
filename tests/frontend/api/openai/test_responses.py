"""Answers have OpenAI's shape: whole, partial, or as the choices of events."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from services.core.interface import TokenLogprobs, Usage
from services.core.request import FinishReason, Request
from services.frontend.api.openai.responses import Answer, ChatAnswer, CompletionAnswer, Echo
from services.frontend.api.openai.unary import Collected
from services.models.tokenizers.byte_level import EOS, ByteTokenizer

USAGE = Usage(prompt_tokens=3, completion_tokens=4)


def choices(*texts: str, reason: FinishReason | None = FinishReason.LENGTH) -> dict[int, Collected]:
    return {index: Collected([text], finish_reason=reason) for index, text in enumerate(texts)}


def encoded(value: Any) -> Any:
    return json.loads(msgspec.json.encode(value))


def test_completion_has_all_fields_of_openai() -> None:
    body = encoded(CompletionAnswer(request_id="r", model="m", created=5).body(choices("text"), USAGE))

    assert body == {
        "id": "cmpl-r",
        "object": "text_completion",
        "created": 5,
        "model": "m",
        "choices": [{"index": 0, "text": "text", "logprobs": None, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7},
    }


def test_chat_completion_has_all_fields_of_openai() -> None:
    body = encoded(ChatAnswer(request_id="r", model="m", created=5).body(choices("text"), USAGE))

    message = {"role": "assistant", "content": "text", "refusal": None}
    assert body == {
        "id": "chatcmpl-r",
        "object": "chat.completion",
        "created": 5,
        "model": "m",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7},
    }


@pytest.mark.parametrize("kind", [CompletionAnswer, ChatAnswer])
def test_choices_are_in_order_and_share_one_usage(kind: type[Answer]) -> None:
    body = encoded(kind(request_id="r", model="m").body(choices("a", "b", "c"), USAGE))

    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["usage"]["total_tokens"] == 7


@pytest.mark.parametrize(
    ("kind", "tokens_of"),
    [
        (CompletionAnswer, lambda logprobs: logprobs["tokens"]),
        (ChatAnswer, lambda logprobs: [entry["token"] for entry in logprobs["content"]]),
    ],
)
def test_each_choice_has_log_probabilities_of_its_own_tokens(
    kind: type[Answer], tokens_of: Callable[[Any], list[str]]
) -> None:
    given = {
        0: Collected(["ab"], [97, 98], [TokenLogprobs(-1.0)] * 2, FinishReason.STOP),
        1: Collected(["c"], [99], [TokenLogprobs(-1.0)], FinishReason.STOP),
    }

    body = encoded(kind(request_id="r", model="m").body(given, USAGE, ByteTokenizer()))

    assert [tokens_of(choice["logprobs"]) for choice in body["choices"]] == [["a", "b"], ["c"]]


def test_partial_answer_has_the_texts_so_far_and_the_finish_reasons_of_ended_choices() -> None:
    given = choices("a", "b", reason=None)
    given[1].finish_reason = FinishReason.STOP

    assert encoded(CompletionAnswer(request_id="r", model="m").partial(given)) == {
        "choices": [
            {"index": 0, "text": "a", "finish_reason": None},
            {"index": 1, "text": "b", "finish_reason": "stop"},
        ]
    }
    message = {"role": "assistant", "content": "a", "refusal": None}
    assert encoded(ChatAnswer(request_id="r", model="m").partial(choices("a", reason=None))) == {
        "choices": [{"index": 0, "message": message, "finish_reason": None}]
    }


@pytest.mark.parametrize("kind", [CompletionAnswer, ChatAnswer])
def test_chunks_have_null_usage_until_the_last_one_if_the_client_asked(kind: type[Answer]) -> None:
    answer = kind(request_id="r", model="m", includes_usage=True)

    assert encoded(answer.chunk([]))["usage"] is None
    assert encoded(answer.chunk([], USAGE))["usage"]["total_tokens"] == 7


@pytest.mark.parametrize("kind", [CompletionAnswer, ChatAnswer])
def test_chunks_have_no_usage_field_unless_the_client_asked(kind: type[Answer]) -> None:
    assert "usage" not in encoded(kind(request_id="r", model="m").chunk([]))


def test_echo_has_the_prompt_that_the_choice_answers() -> None:
    parts = (Request(model="m", text="one", n=2), Request(model="m", token_ids=tuple(b"two"), n=2))
    echo = Echo(Request(model="m", n=2, parts=parts), ByteTokenizer)

    assert [echo.text_of(index) for index in range(4)] == ["one", "one", "two", "two"]


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ({"text": "Say "}, "Say "),
        ({"token_ids": tuple("é€".encode())}, "é€"),
        ({"token_ids": (0xC3,)}, "\N{REPLACEMENT CHARACTER}"),
        ({"token_ids": (97, EOS, 98)}, "a<|end|>b"),
    ],
)
def test_echo_is_the_text_of_the_prompt_or_of_its_tokens(prompt: Any, text: str) -> None:
    echo = Echo(Request(model="m", **prompt), ByteTokenizer)

    body = encoded(CompletionAnswer(request_id="r", model="m", echo=echo).body(choices("ok"), USAGE))

    assert body["choices"][0]["text"] == text + "ok"


def test_echo_opens_each_streamed_choice_of_a_completion() -> None:
    echo = Echo(Request(model="m", text="Say "), ByteTokenizer)

    assert encoded(CompletionAnswer(request_id="r", model="m", echo=echo).opening(0))["text"] == "Say "
    assert CompletionAnswer(request_id="r", model="m").opening(0) is None
