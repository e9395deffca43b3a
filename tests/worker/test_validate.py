"""Validate: a request that bypasses the frontends is completed or refused, so that engines get only valid requests."""

import dataclasses
import random
from typing import Any

import pytest
from msgspec.structs import replace

from services.core.choice_group import ChoiceGroup
from services.core.errors import Failure, Reason
from services.core.model_card import ModelCard, Resume
from services.core.request import Message, Request, Sampling, Stop
from services.models.tokenizers.byte_level import VOCAB_SIZE
from services.worker.validate import Validate
from tests.support.doubles import CARD, Script, call_layer, make_request, run_async


def validated(request: Request) -> Request:
    """The request as the engine receives it."""
    script = Script([7])
    run_async(call_layer(Validate(script, card_of=lambda: CARD, rng=random.Random(1)), request))
    return script.requests[0]


def refusal(request: Request) -> Failure:
    with pytest.raises(Failure) as caught:
        validated(request)
    return caught.value


def test_request_of_a_frontend_passes_unchanged() -> None:
    request = make_request(generated_token_ids=(3, 4), min_tokens=2, sampling=Sampling(temperature=0.5, seed=2**64 - 1))

    assert validated(request) == request


def test_fields_that_a_client_left_out_are_filled_in() -> None:
    """A request without max_tokens, sent directly to a worker, once crashed the engine, and all requests failed."""
    settled = validated(Request(model="m", token_ids=(1, 2)))

    assert settled.max_tokens == CARD.context_length - 2
    assert settled.sampling.temperature == CARD.default_temperature
    assert settled.sampling.seed is not None


@pytest.mark.parametrize(("uses_seeds", "given"), [(True, None), (True, 5), (False, None), (False, 5)])
def test_the_seed_in_use_is_told_unless_the_engine_uses_none(uses_seeds: bool, given: int | None) -> None:
    script = Script([7])
    card = dataclasses.replace(CARD, resume=Resume(sampling=uses_seeds))
    request = Request(model="m", token_ids=(1,), sampling=Sampling(seed=given, temperature=0.0))

    run_async(call_layer(Validate(script, lambda: card, random.Random(1)), request))

    assert script.calls[0].told.seed == (script.requests[0].sampling.seed if uses_seeds else None)


def test_fields_that_a_client_set_are_kept() -> None:
    sampling = validated(Request(model="m", token_ids=(1,), sampling=Sampling(seed=5))).sampling

    assert sampling == Sampling(seed=5, temperature=CARD.default_temperature)
    assert validated(Request(model="m", token_ids=(1,), sampling=Sampling(temperature=0.0))).sampling.temperature == 0


@pytest.mark.parametrize(
    ("fields", "reason", "param"),
    [
        ({"model": "other"}, Reason.MODEL_NOT_FOUND, None),
        ({"token_ids": None, "text": "hi"}, Reason.INVALID_ARGUMENT, "prompt"),
        ({"token_ids": None, "messages": (Message("user", "hi"),)}, Reason.INVALID_ARGUMENT, "prompt"),
        ({"token_ids": None}, Reason.INVALID_ARGUMENT, "prompt"),
        ({"token_ids": ()}, Reason.INVALID_ARGUMENT, "prompt"),
        ({"token_ids": (VOCAB_SIZE,)}, Reason.INVALID_ARGUMENT, "prompt"),
        ({"generated_token_ids": (VOCAB_SIZE,)}, Reason.INVALID_ARGUMENT, "generated_token_ids"),
        ({"token_ids": (1,) * CARD.context_length}, Reason.PROMPT_TOO_LONG, "prompt"),
        ({"sampling": Sampling(temperature=float("nan"))}, Reason.INVALID_ARGUMENT, "temperature"),
        ({"n": 2}, Reason.INVALID_ARGUMENT, "n"),
        ({"stop": Stop(strings=("x",))}, Reason.INVALID_ARGUMENT, "stop"),
        ({"stop": Stop(max_tokens=0)}, Reason.INVALID_ARGUMENT, "max_tokens"),
        ({"stop": Stop(max_tokens=2**31)}, Reason.INVALID_ARGUMENT, "max_tokens"),
    ],
)
def test_invalid_field_is_refused_by_its_name(fields: dict[str, Any], reason: Reason, param: str | None) -> None:
    failure = refusal(replace(make_request(), **fields))

    assert (failure.reason, failure.param) == (reason, param)


def test_choices_of_a_group_are_validated_once_and_share_one_seed() -> None:
    """64 choices with a prompt of 100,000 tokens once blocked the worker for 0.13 s."""
    cards = []

    def card_of() -> ModelCard:
        cards.append(CARD)
        return CARD

    async def scenario() -> list[Request]:
        script, choice_group = Script([7], [8], [9]), ChoiceGroup(3, first=5)
        layer = Validate(script, card_of, random.Random(1))
        request = Request(model="m", token_ids=(1, 2))
        for choice in (5, 6, 7):
            await call_layer(layer, replace(request, choice=choice), choice_group=choice_group)
        return script.requests

    requests = run_async(scenario())

    assert len(cards) == 1
    assert [request.choice for request in requests] == [5, 6, 7]
    assert len({request.sampling.seed for request in requests}) == 1
    assert requests[0].max_tokens == CARD.context_length - 2


def test_choice_group_that_has_ended_leaves_no_state_behind() -> None:
    script = Script([7])
    layer = Validate(script, lambda: CARD, random.Random(1))

    run_async(call_layer(layer, make_request(), choice_group=ChoiceGroup(2)))
    script.calls.clear()

    assert not layer._settled
