"""Preprocess turns a client's request into one that any worker runs in the same way."""

import random
from dataclasses import replace
from typing import Any

import pytest

from services.core.errors import Failure, Reason
from services.core.model_card import Resume
from services.core.request import Guided, GuidedKind, Message, Request, Sampling
from services.core.validation import ANSWERS_MAX
from services.frontend.layers.preprocess import Preprocess
from services.frontend.model_catalog import Model, ModelCatalog
from services.models.tokenizers.byte_level import ByteTokenizer
from tests.support.doubles import CARD, Script, call_layer, encoder_of, make_request, models_of, run_async

CHAT = (Message("system", "Be kind."), Message("user", "Hi"))


def preprocessed(request: Request, **card: Any) -> Request:
    script = Script([7])

    async def scenario() -> None:
        catalog = models_of(replace(CARD, **card))
        try:
            await call_layer(Preprocess(script, catalog, random.Random(1)), request)
        finally:
            await catalog.close()

    run_async(scenario())
    return script.requests[0]


def refused(request: Request, **card: Any) -> Failure:
    with pytest.raises(Failure) as caught:
        preprocessed(request, **card)
    return caught.value


def test_text_is_tokenised() -> None:
    request = preprocessed(make_request(token_ids=None, text="hé"))

    assert (request.token_ids, request.text) == (tuple("hé".encode()), None)


def test_very_long_text_is_tokenised() -> None:
    request = preprocessed(make_request(token_ids=None, text="x" * 40_000), context_length=50_000)

    assert len(request.prompt_token_ids) == 40_000


def test_chat_messages_are_rendered_with_the_models_template() -> None:
    request = preprocessed(make_request(token_ids=None, messages=CHAT))

    assert bytes(request.prompt_token_ids) == b"<system>Be kind.<user>Hi"
    assert request.messages is None


def test_each_of_several_prompts_is_prepared() -> None:
    parts = (make_request(token_ids=None, text="hé"), make_request(prompt=(5,), max_tokens=None))

    request = preprocessed(make_request(token_ids=None, parts=parts), context_length=20)

    assert [part.token_ids for part in request.parts] == [tuple("hé".encode()), (5,)]
    assert request.parts[1].max_tokens == 19


@pytest.mark.parametrize("parts", [("ok", ""), ("ok", "x" * 100), ("ok", "x" * 40_000)])
def test_failure_names_the_prompt_that_caused_it(parts: tuple[str, ...]) -> None:
    asked = tuple(make_request(token_ids=None, text=text, max_tokens=None) for text in parts)

    assert refused(make_request(token_ids=None, parts=asked), context_length=50).param == "prompt[1]"


def test_more_answers_than_the_limit_are_refused() -> None:
    parts = (make_request(n=64),) * (ANSWERS_MAX // 64)

    preprocessed(make_request(token_ids=None, parts=parts, n=64))
    failure = refused(make_request(token_ids=None, parts=(*parts, parts[0]), n=64))

    assert (failure.reason, failure.param) == (Reason.INVALID_ARGUMENT, "prompt")


def test_token_ids_are_not_changed() -> None:
    assert preprocessed(make_request(prompt=(5, 6))).token_ids == (5, 6)


def test_clients_limits_seed_and_temperature_are_kept() -> None:
    asked = make_request(max_tokens=5, sampling=Sampling(temperature=0.5, seed=9, top_k=3))

    assert preprocessed(asked) == asked


def test_unset_limits_seed_and_temperature_are_settled() -> None:
    request = preprocessed(make_request(max_tokens=None, sampling=Sampling()), default_temperature=0.25)

    assert request.max_tokens == CARD.context_length - 2
    assert request.sampling.temperature == 0.25
    assert request.sampling.seed == random.Random(1).getrandbits(64)


def seed_told(request: Request, **card: Any) -> tuple[int | None, Request]:
    """The seed that the client is told, and the request as the workers get it."""
    script = Script([7])

    async def scenario() -> None:
        catalog = models_of(replace(CARD, **card))
        try:
            await call_layer(Preprocess(script, catalog, random.Random(1)), request)
        finally:
            await catalog.close()

    run_async(scenario())
    return script.calls[0].told.seed, script.requests[0]


@pytest.mark.parametrize("given", [None, 9])
def test_the_seed_in_use_is_told(given: int | None) -> None:
    told, request = seed_told(make_request(sampling=Sampling(seed=given)))

    assert told == request.sampling.seed
    assert told == (random.Random(1).getrandbits(64) if given is None else 9)


@pytest.mark.parametrize("given", [None, 9])
def test_no_seed_is_told_if_the_engine_uses_none(given: int | None) -> None:
    told, _ = seed_told(make_request(sampling=Sampling(seed=given, temperature=0.0)), resume=Resume(sampling=False))

    assert told is None


@pytest.mark.parametrize("given", [None, 9])
def test_prompts_of_one_request_get_one_seed_that_is_told(given: int | None) -> None:
    parts = tuple(make_request(prompt, sampling=Sampling(seed=given)) for prompt in ((1,), (2,), (1, 2)))

    told, request = seed_told(make_request(token_ids=None, parts=parts))

    assert {part.sampling.seed for part in request.parts} == {told}
    assert told is not None
    assert given in (None, told)


def test_prompts_that_repeat_get_seeds_of_their_own_and_none_is_told() -> None:
    """With one seed, their answers would be equal, as if a client had asked for that."""
    parts = tuple(make_request(prompt, sampling=Sampling()) for prompt in ((1,), (2,), (1,)))

    told, request = seed_told(make_request(token_ids=None, parts=parts))

    assert len({part.sampling.seed for part in request.parts}) == 3
    assert told is None


def test_prompts_that_repeat_keep_the_clients_seed() -> None:
    parts = (make_request((1,), sampling=Sampling(seed=9)),) * 2

    told, request = seed_told(make_request(token_ids=None, parts=parts))

    assert [part.sampling.seed for part in request.parts] == [9, 9]
    assert told == 9


@pytest.mark.parametrize(
    ("fields", "card", "param"),
    [
        ({"n": 2, "generated_choices": ((7,),)}, {}, "generated_choices"),
        ({"n": 2, "generated_choices": (None, None)}, {}, "generated_choices"),
        ({"n": 2, "generated_choices": ((300,), ())}, {}, "generated_choices"),
        ({"n": 2, "generated_choices": ((), (1,) * 17)}, {}, "generated_choices"),
        ({"generated_token_ids": (1,) * 17}, {}, "generated_token_ids"),
        ({"generated_token_ids": (300,)}, {}, "generated_token_ids"),
        ({"generated_token_ids": (1,), "logprobs": 1}, {"has_logprobs": True}, "generated_token_ids"),
        (
            {"generated_token_ids": (1,), "guided": Guided(GuidedKind.JSON_OBJECT)},
            {"guided": ("json_object",)},
            "generated_token_ids",
        ),
        (
            {"n": 2, "generated_choices": ((1,), ()), "sampling": Sampling(presence_penalty=1.0)},
            {"resume": Resume(penalties=False)},
            "generated_choices",
        ),
    ],
    ids=[
        "too few choices",
        "all complete",
        "unknown token",
        "more than max_tokens",
        "more than max_tokens, one choice",
        "unknown token, one choice",
        "an engine that loses log probabilities",
        "an engine that loses forms",
        "an engine that loses penalties",
    ],
)
def test_tokens_that_no_answer_can_continue_after_are_refused(
    fields: dict[str, Any], card: dict[str, Any], param: str
) -> None:
    failure = refused(make_request(**fields), **card)

    assert (failure.reason, failure.param) == (Reason.INVALID_ARGUMENT, param)


def test_a_request_all_of_whose_prompts_are_complete_is_refused() -> None:
    parts = (make_request(n=2, generated_choices=(None, None)),) * 2

    assert refused(make_request(token_ids=None, n=2, parts=parts)).param == "generated_choices"


@pytest.mark.parametrize("parts", [(), ((1, 2), (5,))])
def test_the_prompts_are_told_as_token_ids(parts: tuple[tuple[int, ...], ...]) -> None:
    script = Script([7])
    request = make_request(token_ids=None, parts=tuple(map(make_request, parts))) if parts else make_request((8, 9))

    run_async(call_layer(Preprocess(script, models_of(), random.Random(1)), request))

    assert script.calls[0].told.prompts == list(parts or ((8, 9),))


@pytest.mark.parametrize(
    ("request_fields", "card", "reason", "param"),
    [
        ({"model": "other"}, {}, Reason.MODEL_NOT_FOUND, "model"),
        ({"prompt": (300,)}, {}, Reason.INVALID_ARGUMENT, "prompt"),
        ({"prompt": (1,) * 20}, {"context_length": 20}, Reason.PROMPT_TOO_LONG, "prompt"),
        ({"token_ids": None, "messages": CHAT}, {"chat_template": ""}, Reason.INVALID_ARGUMENT, "messages"),
    ],
)
def test_refuses(request_fields: dict[str, Any], card: dict[str, Any], reason: Reason, param: str) -> None:
    failure = refused(make_request(**request_fields), **card)

    assert (failure.reason, failure.param) == (reason, param)


class Unread(ByteTokenizer):
    """A tokeniser whose longest token has five characters, and that must not be used."""

    token_characters_max = 5

    def encode(self, text: str, *, add_special: bool, parse_special: bool = True) -> list[int]:
        raise AssertionError("tokenised")


@pytest.mark.parametrize(
    ("prompt", "param"),
    [({"text": "x" * 101}, "prompt"), ({"messages": (Message("user", "x" * 51),) * 2}, "messages")],
)
def test_text_that_cannot_fit_is_refused_without_being_tokenised(prompt: dict[str, Any], param: str) -> None:
    """A bug: 16 MiB of text became 285 MiB of tokens and blocked every stream for 0.6 s before it was refused."""
    catalog = ModelCatalog()
    catalog.add(Model(replace(CARD, context_length=20), encoder_of(Unread())))
    layer = Preprocess(Script([7]), catalog, random.Random(1))

    with pytest.raises(Failure) as caught:
        run_async(call_layer(layer, make_request(token_ids=None, **prompt)))

    assert (caught.value.reason, caught.value.param) == (Reason.PROMPT_TOO_LONG, param)


@pytest.mark.parametrize(
    ("prompt", "is_inside"),
    [
        ({"text": "x" * 100}, True),
        ({"text": "x" * 40_000}, False),
        ({"messages": (Message("user", "x" * 20_000),) * 2}, False),
        ({"messages": (Message("user", "x"),) * 300}, False),
        ({"parts": (make_request(token_ids=None, text="x" * 20_000),) * 2}, False),
    ],
)
def test_long_prompt_is_prepared_in_another_process(prompt: dict[str, Any], is_inside: bool) -> None:
    inside = []

    class Noting(ByteTokenizer):
        def encode(self, text: str, *, add_special: bool, parse_special: bool = True) -> list[int]:
            inside.append(text)
            return super().encode(text, add_special=add_special)

    async def scenario() -> int:
        encoder, catalog, script = encoder_of(Noting()), ModelCatalog(), Script([7], [7])
        catalog.add(Model(replace(CARD, context_length=100_000), encoder))
        try:
            layer = Preprocess(script, catalog, random.Random(1))
            await call_layer(layer, make_request(token_ids=None, **prompt))
        finally:
            await encoder.close()
        [request] = script.requests
        return sum(len(one.prompt_token_ids) for one in request.parts or (request,))

    assert run_async(scenario()) >= 100
    assert bool(inside) == is_inside
