"""Codec: decoding restores what was encoded, and a field that cannot be honoured is refused by name."""

import math
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from services.core.errors import Failure, Reason
from services.core.interface import Delta, TokenLogprobs, Usage
from services.core.model_card import ModelCard, Resume, TokenizerRef
from services.core.request import Continuation, FinishReason, Guided, GuidedKind, Message, Request, Sampling, Stop
from services.rpc.codec import (
    card_from_wire,
    card_to_wire,
    delta_to_wire,
    error_from_wire,
    error_to_wire,
    finish_reason_from_wire,
    finish_reason_to_wire,
    logprobs_from_wire,
    logprobs_to_wire,
    put_request,
    request_from_wire,
    seconds_from_wire,
    seconds_to_wire,
)
from services.stubs import inference_pb2, worker_pb2

COUNTS = st.integers(0, 2**32 - 1)
TOKENS = st.lists(COUNTS, max_size=5).map(tuple)
FLOATS = st.floats(width=32, allow_nan=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
PROMPTS: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.fixed_dictionaries({"text": TEXT}),
    st.fixed_dictionaries({"token_ids": TOKENS}),
    st.fixed_dictionaries({"messages": st.lists(st.builds(Message, TEXT, TEXT, TEXT), max_size=3).map(tuple)}),
    st.just({}),
)
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.none() | FLOATS,
    top_p=FLOATS,
    top_k=COUNTS,
    min_p=FLOATS,
    seed=st.none() | st.integers(0, 2**64 - 1),
    presence_penalty=FLOATS,
    frequency_penalty=FLOATS,
    repetition_penalty=FLOATS,
    logit_bias=st.dictionaries(COUNTS, FLOATS, max_size=3).map(lambda bias: tuple(sorted(bias.items()))),
)
STOPS = st.builds(
    Stop,
    strings=st.lists(TEXT, max_size=3).map(tuple),
    token_ids=TOKENS,
    ignore_eos=st.booleans(),
    min_tokens=COUNTS,
    max_tokens=st.none() | COUNTS,
)
GUIDED = st.one_of(
    st.just(Guided(GuidedKind.JSON_OBJECT)),
    st.lists(TEXT, max_size=3).map(lambda texts: Guided(GuidedKind.CHOICE, tuple(texts))),
    st.builds(
        lambda kind, text: Guided(kind, (text,)),
        st.sampled_from([GuidedKind.JSON_SCHEMA, GuidedKind.REGEX, GuidedKind.GRAMMAR]),
        TEXT,
    ),
)
REQUESTS = st.builds(
    Request,
    model=TEXT,
    generated_token_ids=TOKENS,
    generated_choices=st.just(()),
    n=COUNTS,
    choice=COUNTS,
    logprobs=st.none() | COUNTS,
    guided=st.none() | GUIDED,
    sampling=SAMPLINGS,
    stop=STOPS,
)


@given(prompt=PROMPTS, request=REQUESTS)
def test_every_request_is_decoded_as_it_was_encoded(prompt: dict[str, Any], request: Request) -> None:
    """Through bytes, as between processes. Empty and absent prompts stay different."""
    request = replace(request, **prompt)
    message = inference_pb2.GenerateRequest()
    put_request(message, request)

    assert request_from_wire(inference_pb2.GenerateRequest.FromString(message.SerializeToString())) == request


@given(generated=st.lists(st.none() | TOKENS, min_size=2, max_size=5).map(tuple))
def test_tokens_of_each_choice_are_decoded_as_they_were_encoded(generated: tuple[tuple[int, ...] | None, ...]) -> None:
    request = Request(model="m", n=len(generated)).continued(generated)
    message = inference_pb2.GenerateRequest()
    put_request(message, request)

    decoded = request_from_wire(inference_pb2.GenerateRequest.FromString(message.SerializeToString()))

    assert decoded == request
    assert [decoded.generated_of(choice) for choice in decoded.open_choices] == [
        one for one in generated if one is not None
    ]


def test_absent_fields_have_the_defaults_of_the_proto_file() -> None:
    request = request_from_wire(inference_pb2.GenerateRequest(model="m"))

    assert request == Request(model="m")
    assert (request.sampling.top_p, request.sampling.repetition_penalty) == (1.0, 1.0)
    assert (request.sampling.temperature, request.sampling.seed, request.stop.max_tokens) == (None, None, None)


def test_zero_differs_from_absent() -> None:
    request = request_from_wire(
        inference_pb2.GenerateRequest(
            sampling=inference_pb2.Sampling(temperature=0, top_p=0, seed=0, repetition_penalty=0),
            stop=inference_pb2.Stop(max_tokens=0),
        )
    )

    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.seed) == (0, 0, 0)
    assert (request.sampling.repetition_penalty, request.stop.max_tokens) == (0, 0)


def test_nan_is_passed_on_to_validation() -> None:
    message = inference_pb2.GenerateRequest(sampling=inference_pb2.Sampling(temperature=math.nan))
    temperature = request_from_wire(message).sampling.temperature

    assert temperature is not None
    assert math.isnan(temperature)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"guided": inference_pb2.Guided()}, "guided"),
        ({"guided": inference_pb2.Guided(json_object=False)}, "guided"),
        ({"session_id": "s"}, "session_id"),
        ({"priority": 1}, "priority"),
        (
            {"generated_token_ids": [1], "generated_choices": [inference_pb2.GeneratedChoice(complete=True)]},
            "generated_choices",
        ),
    ],
)
def test_field_that_this_version_cannot_honour_is_refused_by_name(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(Failure) as caught:
        request_from_wire(inference_pb2.GenerateRequest(model="m", **fields))

    assert (caught.value.reason, caught.value.param) == (Reason.INVALID_ARGUMENT, name)
    assert name in caught.value.detail


def test_every_field_of_a_request_is_read_or_refused() -> None:
    """A new field in the proto file must not be ignored silently."""
    prompts = {"text", "chat", "tokens"}
    read = prompts | {"model", "generated_token_ids", "sampling", "stop", "choice", "n", "logprobs", "guided"}
    read |= {"generated_choices"}
    refused = {"session_id", "priority"}
    by_the_server = {"request_id"}

    assert {field.name for field in inference_pb2.GenerateRequest.DESCRIPTOR.fields} == read | refused | by_the_server
    assert {field.name for field in inference_pb2.Sampling.DESCRIPTOR.fields} == set(Sampling.__struct_fields__)
    stop = set(Stop.__struct_fields__) - {"max_tokens_default"}  # Only HTTP has a default, and `settle` applies it.
    assert {field.name for field in inference_pb2.Stop.DESCRIPTOR.fields} == stop
    assert {field.name for field in inference_pb2.ChatMessage.DESCRIPTOR.fields} == set(Message.__struct_fields__)
    assert {field.name for field in inference_pb2.Guided.DESCRIPTOR.fields} == set(GuidedKind)


def test_delta_is_encoded_without_complete_final() -> None:
    item = delta_to_wire(Delta(3, (7, 8), "ab", choice=1))

    assert (item.delta.position, list(item.delta.token_ids), item.delta.text, item.delta.choice) == (3, [7, 8], "ab", 1)
    assert not item.complete_final
    assert item.delta.finish_reason == inference_pb2.FINISH_REASON_UNSPECIFIED
    assert not item.delta.HasField("usage")


def test_last_delta_says_how_the_choice_continued() -> None:
    moved = delta_to_wire(Delta(5, (), finish_reason=FinishReason.LENGTH, continuation=Continuation.PREFIX))
    unmoved = delta_to_wire(Delta(5, (), finish_reason=FinishReason.LENGTH))

    assert moved.delta.continuation == inference_pb2.CONTINUATION_PREFIX
    assert unmoved.delta.continuation == inference_pb2.CONTINUATION_UNSPECIFIED


def test_last_delta_has_finish_reason_and_usage() -> None:
    item = delta_to_wire(Delta(5, (), choice=1, finish_reason=FinishReason.LENGTH, usage=Usage(2, 5)))

    assert (item.delta.finish_reason, item.delta.position) == (inference_pb2.FINISH_REASON_LENGTH, 5)
    assert (item.delta.usage.prompt_tokens, item.delta.usage.completion_tokens) == (2, 5)
    assert not item.complete_final


def test_log_probabilities_are_decoded_as_they_were_encoded() -> None:
    logprobs = [TokenLogprobs(-0.5), TokenLogprobs(-0.25, ((7, -0.25), (8, -1.5)))]

    item = delta_to_wire(Delta(0, (1, 7), logprobs=logprobs))

    assert [logprobs_from_wire(one) for one in item.delta.logprobs] == logprobs
    assert logprobs_from_wire(logprobs_to_wire(logprobs[1])) == logprobs[1]


@pytest.mark.parametrize("reason", FinishReason)
def test_finish_reasons_are_decoded_as_they_were_encoded(reason: FinishReason) -> None:
    assert finish_reason_from_wire(finish_reason_to_wire(reason)) is reason


def test_unspecified_finish_reason_is_none_and_an_unknown_one_is_a_violation() -> None:
    assert finish_reason_from_wire(0) is None
    with pytest.raises(Failure) as caught:
        finish_reason_from_wire(99)
    assert caught.value.reason is Reason.PROTOCOL_VIOLATION


@pytest.mark.parametrize("reason", Reason)
def test_failures_keep_reason_and_detail_on_a_session(reason: Reason) -> None:
    failure = error_from_wire(error_to_wire(Failure(reason, "größer", param="p")))

    assert (failure.reason, failure.detail, failure.param) == (reason, "größer", "p")
    assert (failure.metadata, failure.retry_after_s) == ({}, None)


@pytest.mark.parametrize("retry_after_s", [0.0, 1.5])
def test_refusals_keep_metadata_and_retry_time_on_a_session(retry_after_s: float) -> None:
    told = Failure(Reason.WORKER_AT_CAPACITY, "full", retry_after_s=retry_after_s, metadata={"running": "4"})

    failure = error_from_wire(error_to_wire(told))

    assert (failure.metadata, failure.retry_after_s) == ({"running": "4"}, retry_after_s)


@pytest.mark.parametrize("reason", ["", "FROM_THE_FUTURE", "stalled"])
def test_unknown_reason_becomes_an_engine_error(reason: str) -> None:
    assert error_from_wire(worker_pb2.Error(reason=reason, detail="d")).reason is Reason.ENGINE_ERROR


def test_every_field_of_a_model_card_is_decoded_as_it_was_encoded() -> None:
    card = ModelCard(
        model="m",
        engine="e",
        context_length=7,
        vocab_size=8,
        tokenizer=TokenizerRef("gguf", "abc"),
        chat_template="t",
        bos_token="<s>",
        eos_token="</s>",
        default_temperature=0.5,
        guided=("regex",),
        has_logprobs=True,
        resume=Resume(sampling=False, penalties=False, guided=True, logprobs=True),
    )
    plain = ModelCard(model="m", engine="e", context_length=7, vocab_size=8, tokenizer=TokenizerRef("bytes"))

    assert card_from_wire(card_to_wire(card)) == card
    assert card_from_wire(card_to_wire(plain)) == plain


@pytest.mark.parametrize("seconds", [0.0, 0.25, 1.0, 30.5, -1.5, 1e9])
def test_durations_are_decoded_as_they_were_encoded(seconds: float) -> None:
    assert seconds_from_wire(seconds_to_wire(seconds)) == seconds


def test_durations_keep_nanoseconds() -> None:
    assert seconds_to_wire(1.000000001) == Duration(seconds=1, nanos=1)
