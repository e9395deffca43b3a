"""Unknown fields of a body are ignored, unsupported ones are refused by name, and too large ones by a bound."""

import json
from typing import Any

import pytest

from services.core.errors import Failure
from services.core.request import Message, Request
from services.core.validation import MESSAGES_MAX
from services.frontend.api.openai.parse import parse_chat, parse_completion
from services.http.json_decode import FIELD_BYTES_MAX


def completion(**fields: Any) -> Request:
    return parse_completion(json.dumps({"model": "m", "prompt": "hi"} | fields).encode()).to_request()


def chat(*contents: Any, **fields: Any) -> Request:
    messages = [{"role": "user", "content": content} for content in contents or ("hi",)]
    return parse_chat(json.dumps({"model": "m", "messages": messages} | fields).encode()).to_request()


def refused(ask: Any, **fields: Any) -> str | None:
    """The param with which `ask` refuses the fields."""
    with pytest.raises(Failure) as caught:
        ask(**fields)
    return caught.value.param


def test_unknown_fields_are_ignored() -> None:
    unknown = {"metadata": {"a": "b"}, "made_up": [1, {"x": None}], "tools": None}

    assert completion(**unknown) == completion()
    assert chat(**unknown) == chat()
    assert chat(messages=[{"role": "user", "content": "hi", "made_up": 1, "tool_calls": []}]) == chat()


@pytest.mark.parametrize(
    "fields",
    [
        {"model": None},
        {"n": "two"},
        {"temperature": "warm"},
        {"stop": [1]},
        {"logit_bias": {"x": 1}},
        {"stream_options": {"include_usage": True}},
        {"messages": [{"role": "user"}]},
        {"messages": [{"content": "hi"}]},
    ],
)
def test_errors_are_the_same_with_and_without_unknown_fields(fields: dict[str, Any]) -> None:
    """A body without unknown fields is decoded another way."""
    told = set()
    for more in ({}, {"made_up": 1}):
        with pytest.raises(Failure) as caught:
            chat(**fields, **more)
        told.add((caught.value.reason, caught.value.param, caught.value.detail))

    assert len(told) == 1


def test_unsupported_fields_are_refused_by_name() -> None:
    assert refused(completion, best_of=2) == "best_of"
    assert refused(completion, top_logprobs=1) == "top_logprobs"
    assert refused(chat, tools=[{"type": "function"}]) == "tools"
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "x", "tool_calls": [{}]}]
    assert refused(chat, messages=messages) == "messages[1].tool_calls"
    assert (
        refused(completion, structured_outputs={"regex": "a", "structural_tag": "x"})
        == "structured_outputs.structural_tag"
    )


@pytest.mark.parametrize("name", ["logit_bias", "stop", "tools", "guided_json", "structured_outputs", "unknown"])
def test_large_field_is_refused_before_it_is_decoded(name: str) -> None:
    """Bug: a body full of biases, or of tools, was decoded first, which blocked all streams for seconds."""
    for parse, prompt in ((parse_completion, '"prompt": "hi"'), (parse_chat, '"messages": []')):
        body = f'{{"model": "m", {prompt}, "{name}": "{"x" * FIELD_BYTES_MAX}"}}'

        with pytest.raises(Failure, match="is longer than 1 MiB") as caught:
            parse(body.encode())

        assert caught.value.param == name


def test_prompt_may_be_larger() -> None:
    long = "x" * FIELD_BYTES_MAX

    assert completion(prompt=long).text == long
    assert chat(long).messages == (Message("user", long),)


def test_too_many_messages_are_refused() -> None:
    chat(*["x"] * MESSAGES_MAX)

    with pytest.raises(Failure, match=f"messages must have at most {MESSAGES_MAX} items") as caught:
        chat(*["x"] * (MESSAGES_MAX + 1))

    assert caught.value.param == "messages"
