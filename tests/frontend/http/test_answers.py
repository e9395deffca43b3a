"""Answers have OpenAI's shape, and no text can break the frame around it."""

import json

import pytest

from services.frontend.http.answers import Answer, ChatAnswer, CompletionAnswer, json_text
from services.request import Finish, FinishReason, Usage

FINISH = Finish(FinishReason.LENGTH, Usage(prompt_tokens=3, completion_tokens=4))


@pytest.mark.parametrize("text", ["", "plain", '"\\\n\r\t', "\x00\x1c\x7f", "é😀", "\u0085\u2028\u2029", "\U0010ffff"])
def test_text_comes_back_from_one_line_of_json(text: str) -> None:
    encoded = json_text(text)

    assert json.loads(encoded) == text
    assert len(encoded.decode().splitlines()) == 1


@pytest.mark.parametrize("kind", [CompletionAnswer, ChatAnswer])
@pytest.mark.parametrize("model", ["m", "\0", '"\\u0000"', "\n\n"])
def test_the_frame_fits_every_model_name(kind: type[Answer], model: str) -> None:
    head, tail = kind(request_id="r", model=model).frame()

    event = json.loads((head + json_text("hi") + tail).removeprefix(b"data: "))
    assert event["model"] == model
    assert "hi" in json.dumps(event["choices"][0])
    assert tail.endswith(b"\n\n")


def test_a_whole_completion() -> None:
    body = json.loads(CompletionAnswer(request_id="r", model="m", created=5).body("text", FINISH))

    assert body == {
        "id": "cmpl-r",
        "object": "text_completion",
        "created": 5,
        "model": "m",
        "choices": [{"index": 0, "text": "text", "logprobs": None, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7},
    }


def test_a_whole_chat_completion() -> None:
    body = json.loads(ChatAnswer(request_id="r", model="m", created=5).body("text", FINISH))

    message = {"role": "assistant", "content": "text"}
    assert body == {
        "id": "chatcmpl-r",
        "object": "chat.completion",
        "created": 5,
        "model": "m",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7},
    }
