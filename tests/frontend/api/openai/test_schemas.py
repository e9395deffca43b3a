"""Schemas describe bodies completely: a field is always there, unless it is UNSET; none has another default."""

import inspect

import msgspec
import pytest
from msgspec import NODEFAULT, UNSET, Struct

from services.core.request import FinishReason
from services.frontend.api.openai import schemas

ALL = [
    shape
    for _, shape in inspect.getmembers(schemas, inspect.isclass)
    if issubclass(shape, Struct) and shape.__module__ == schemas.__name__
]
EXAMPLES: list[tuple[type[Struct], str]] = [
    (schemas.Usage, '{"prompt_tokens":1,"completion_tokens":2,"total_tokens":3}'),
    (schemas.CompletionChoice, '{"index":0,"text":"a","logprobs":null,"finish_reason":null}'),
    (schemas.ChatDelta, "{}"),
    (schemas.ChatDelta, '{"role":"assistant","content":""}'),
    (schemas.ChatChunkChoice, '{"index":0,"delta":{"content":"a"},"logprobs":null,"finish_reason":"stop"}'),
    (schemas.ChatTokenLogprob, '{"token":"a","logprob":-0.5,"bytes":[97],"top_logprobs":[]}'),
    (schemas.AssistantMessage, '{"role":"assistant","content":"a","refusal":null}'),
    (schemas.Model, '{"id":"m","object":"model","created":1,"owned_by":"unbroken","max_model_len":9}'),
]


@pytest.mark.parametrize("shape", ALL)
def test_field_has_no_default_but_unset(shape: type[Struct]) -> None:
    for field in msgspec.structs.fields(shape):
        assert field.default in (NODEFAULT, UNSET), field.name
        assert field.default_factory is NODEFAULT, field.name


@pytest.mark.parametrize(("shape", "encoded"), EXAMPLES)
def test_fields_are_encoded_in_the_order_of_openai_and_without_unset_ones(shape: type[Struct], encoded: str) -> None:
    assert msgspec.json.encode(msgspec.json.decode(encoded, type=shape)).decode() == encoded


@pytest.mark.parametrize("reason", list(FinishReason))
def test_finish_reason_is_the_word_of_openai(reason: FinishReason) -> None:
    choice = schemas.CompletionChoice(index=0, text="", logprobs=None, finish_reason=reason)

    assert msgspec.to_builtins(choice)["finish_reason"] == reason.value


def test_another_finish_reason_is_not_accepted() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(
            b'{"index":0,"text":"a","logprobs":null,"finish_reason":"error"}', type=schemas.CompletionChoice
        )
