"""Checks that answers match the types of the `openai` package exactly: `strict.py http://HOST:PORT/v1`.

The package itself ignores fields that it does not know. This program prints a line of JSON for each kind of answer,
with the fields that no type has.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

from openai import OpenAI
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

MODEL = "mocker"
COMMON: Any = {"model": MODEL, "max_tokens": 20, "n": 2}
CHAT = {**COMMON, "messages": [{"role": "user", "content": "Hello!"}], "logprobs": True, "top_logprobs": 2}
COMPLETION = {**COMMON, "prompt": "Hello!", "logprobs": 2}
STREAMED: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
UNENDED = ('"finish_reason":null', '"finish_reason":"stop"')
"""The type Completion requires a finish reason, although the package reads streams with it as well."""


def main() -> None:
    """Request and check one answer of each kind."""
    with OpenAI(base_url=sys.argv[1], api_key="none") as client:
        check("model", Model, body(client.models.with_raw_response.retrieve(MODEL)))
        chat = client.chat.completions.with_raw_response.create
        check("chat", ChatCompletion, body(chat(**CHAT)))
        check("chat_stream", ChatCompletionChunk, *events(body(chat(**CHAT, **STREAMED))))
        completion = client.completions.with_raw_response.create
        check("completion", Completion, body(completion(**COMPLETION)))
        streamed = body(completion(**COMPLETION, **STREAMED)).replace(*UNENDED)
        check("completion_stream", Completion, *events(streamed))


def body(response: Any) -> str:
    """Return the body of a response as text."""
    text: str = response.http_response.read().decode()
    return text


def events(text: str) -> list[str]:
    """Return the data of each event except the last, `[DONE]`."""
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return lines


def check(step: str, kind: Any, *texts: str) -> None:
    """Print the fields that the type does not have. Raises ValidationError if an answer does not fit the type."""
    assert texts
    read = [kind.model_validate_json(text, strict=True) for text in texts]
    print(
        json.dumps({"step": step, "unknown": sorted({name for one in read for name in unknown_fields(one)})}),
        flush=True,
    )


def unknown_fields(value: Any) -> Iterator[str]:
    """Yield the names of fields that no type has, in this value and all that it contains."""
    if isinstance(value, list):
        for item in value:
            yield from unknown_fields(item)
    elif hasattr(value, "model_extra"):
        yield from value.model_extra
        for name in type(value).model_fields:
            yield from unknown_fields(getattr(value, name))


if __name__ == "__main__":
    main()
