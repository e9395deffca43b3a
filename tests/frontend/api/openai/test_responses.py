"""Answers have OpenAI's shape, and no text can break the frame around it."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from services.core.interface import TokenLogprobs, Usage
from services.core.request import FinishReason
from services.frontend.api.openai.responses import Answer, ChatAnswer, CompletionAnswer, json_text
from services.frontend.api.openai.unary import Collected
from services.models.tokenizers.byte_level import ByteTokenizer

USAGE = Usage(prompt_tokens=3, completion_tokens=4)


def choices(*texts: str, reason: FinishReason | None = FinishReason.LENGTH) -> dict[int, Collected]:
    return {index: Collected([text], finish_reason=reason) for index, text in enumerate(texts)}


@pytest.mark.parametrize("text", ["", "plain", '"\\\n\r\t', "\x00\x1c\x7f", "é😀", "\u0085\u2028\u2029", "\U0010ffff"])
def test_text_comes_back_from_one_line_of_json(text: str) -> None:
    encoded = json_text(text)

    assert json.loads(encoded) == text
    assert len(encoded.decode().splitlines()) == 1


@pytest.mark.parametrize("kind", [CompletionAnswer, ChatAnswer])
@pytest.mark.parametrize("model", ["m", "\0", '"\\u0000"', "\n\n"])
def test_the_frame_fits_every_model_name(kind: type[Answer], model: str) -> None:
    head, tail = kind(request_id="r", model=model).frame(7)

    event = json.loads((head + json_text("hi") + tail).removeprefix(b"data: "))
    assert event["model"] == model
    assert event["choices"][0]["index"] == 7
    assert "hi" in json.dumps(event["choices"][0])
    assert tail.endswith(b"\n\n")


def test_a_whole_completion() -> None:
    body = json.loads(CompletionAnswer(request_id="r", model="m", created=5).body(choices("text"), USAGE))

    assert body == {
        "id": "cmpl-r",
        "object": "text_completion",
        "created": 5,
        "model": "m",
        "choices": [{"index": 0, "text": "text", "logprobs": None, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7},
    }


def test_a_whole_chat_completion() -> None:
    body = json.loads(ChatAnswer(request_id="r", model="m", created=5).body(choices("text"), USAGE))

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
def test_choices_stand_in_order_under_one_usage(kind: type[Answer]) -> None:
    body = json.loads(kind(request_id="r", model="m").body(choices("a", "b", "c"), USAGE))

    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["usage"]["total_tokens"] == 7


@pytest.mark.parametrize(
    ("kind", "tokens_of"),
    [
        (CompletionAnswer, lambda logprobs: logprobs["tokens"]),
        (ChatAnswer, lambda logprobs: [entry["token"] for entry in logprobs["content"]]),
    ],
)
def test_log_probabilities_are_whole_and_each_choices_own(
    kind: type[Answer], tokens_of: Callable[[Any], list[str]]
) -> None:
    given = {
        0: Collected(["ab"], [97, 98], [TokenLogprobs(-1.0)] * 2, FinishReason.STOP),
        1: Collected(["c"], [99], [TokenLogprobs(-1.0)], FinishReason.STOP),
    }

    body = json.loads(kind(request_id="r", model="m").body(given, USAGE, ByteTokenizer.token_bytes))

    assert [tokens_of(choice["logprobs"]) for choice in body["choices"]] == [["a", "b"], ["c"]]


def test_a_partial_answer_says_what_had_come_and_which_choices_had_ended() -> None:
    given = choices("a", "b", reason=None)
    given[1].finish_reason = FinishReason.STOP

    assert CompletionAnswer(request_id="r", model="m").partial(given) == {
        "choices": [
            {"index": 0, "text": "a", "finish_reason": None},
            {"index": 1, "text": "b", "finish_reason": "stop"},
        ]
    }
    message = {"role": "assistant", "content": "a", "refusal": None}
    assert ChatAnswer(request_id="r", model="m").partial(choices("a", reason=None)) == {
        "choices": [{"index": 0, "message": message, "finish_reason": None}]
    }


@pytest.mark.parametrize("kind", [CompletionAnswer, ChatAnswer])
def test_usage_is_an_event_of_its_own_where_asked(kind: type[Answer]) -> None:
    plain, asked = (kind(request_id="r", model="m", includes_usage=asks).ending(USAGE) for asks in (False, True))

    assert plain == b"data: [DONE]\n\n"
    assert b'"choices":[]' in asked
    assert b'"total_tokens":7' in asked
    assert asked.endswith(b"\n\n" + plain)
