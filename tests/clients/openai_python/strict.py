"""Are answers to the letter what the types of the `openai` package say? `strict.py http://HOST:PORT/v1`.

The package itself reads what it can and passes over the rest. It prints a line of JSON for each kind of answer, with
the fields that no type knows.
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
"""The type Completion has no choice that is not at its end, though streams are read with it as well."""


def main() -> None:
    """Read one of each."""
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
    """What came, as it came."""
    text: str = response.http_response.read().decode()
    return text


def events(text: str) -> list[str]:
    """The data of each, without the last one, which is no JSON."""
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return lines


def check(step: str, kind: Any, *texts: str) -> None:
    """Print what the type does not know. Raises ValidationError if it does not fit."""
    assert texts
    read = [kind.model_validate_json(text, strict=True) for text in texts]
    print(json.dumps({"step": step, "unknown": sorted({name for one in read for name in unknown(one)})}), flush=True)


def unknown(value: Any) -> Iterator[str]:
    """Names of fields that no type knows, of this and all that is in it."""
    if isinstance(value, list):
        for item in value:
            yield from unknown(item)
    elif hasattr(value, "model_extra"):
        yield from value.model_extra
        for name in type(value).model_fields:
            yield from unknown(getattr(value, name))


if __name__ == "__main__":
    main()
