"""The range of a field in the OpenAPI document is the range that is checked, exactly at the bound."""

import json
from typing import Any

import msgspec
import pytest

from services.core.errors import Failure
from services.core.validation import (
    LOGIT_BIASES_MAX,
    RANGES,
    STOP_STRING_CHARACTERS_MAX,
    STOP_STRINGS_MAX,
    STOP_TOKENS_MAX,
    check_request,
)
from services.frontend.api.admin.http_routes import ThresholdsChange
from services.frontend.api.openai.bodies import ChatBody, CompletionBody
from services.frontend.api.openai.parse import parse_chat, parse_completion
from services.frontend.routing.thresholds import THRESHOLDS, TOKENS_MAX, Thresholds

SCHEMAS = msgspec.json.schema_components([CompletionBody, ChatBody, ThresholdsChange])[1]
PROPERTIES = SCHEMAS["CompletionBody"]["properties"]
TOLD = {
    name: {bound: value for one in told.get("anyOf", ()) for bound, value in one.items() if "imum" in bound}
    for name, told in PROPERTIES.items()
}
BOUNDS = [(name, bound, value) for name, told in TOLD.items() for bound, value in told.items()]


def check(**fields: Any) -> None:
    body = parse_completion(json.dumps({"model": "m", "prompt": "hi"} | fields).encode())
    try:
        check_request(body.to_request())
    except Failure as failure:
        body.name_fields(failure)
        raise


def test_document_has_every_range_of_sampling() -> None:
    assert {name for name in RANGES if not TOLD[name]} == set()


@pytest.mark.parametrize(("name", "bound", "value"), BOUNDS)
def test_value_at_its_documented_bound_is_accepted_and_one_beyond_is_refused(name: str, bound: str, value: Any) -> None:
    step = 1 if PROPERTIES[name]["anyOf"][0]["type"] == "integer" else 0.001
    beyond = value if bound == "exclusiveMinimum" else value + step if bound == "maximum" else value - step

    check(**{name: value + step if bound == "exclusiveMinimum" else value})
    with pytest.raises(Failure) as caught:
        check(**{name: beyond})

    assert caught.value.param == name


def biases(count: int) -> dict[str, int]:
    return {str(token): 1 for token in range(count)}


@pytest.mark.parametrize(
    ("name", "told", "taken", "beyond"),
    [
        ("model", "minLength", "m", ""),
        ("prompt", "minLength", "x", ""),
        ("prompt", "minItems", [1], []),
        ("stop", "minLength", "x", ""),
        ("stop", "maxLength", "x" * STOP_STRING_CHARACTERS_MAX, "x" * (STOP_STRING_CHARACTERS_MAX + 1)),
        ("stop", "maxItems", ["x"] * STOP_STRINGS_MAX, ["x"] * (STOP_STRINGS_MAX + 1)),
        ("stop_token_ids", "maxItems", [1] * STOP_TOKENS_MAX, [1] * (STOP_TOKENS_MAX + 1)),
        ("logit_bias", "maximum", {"1": 100}, {"1": 100.1}),
        ("logit_bias", "minimum", {"1": -100}, {"1": -100.1}),
        ("logit_bias", "pattern", {"1": 1}, {"x": 1}),
        ("logit_bias", "maxProperties", biases(LOGIT_BIASES_MAX), biases(LOGIT_BIASES_MAX + 1)),
    ],
)
def test_documented_sizes_are_the_checked_sizes(name: str, told: str, taken: Any, beyond: Any) -> None:
    assert told in _keywords(PROPERTIES[name])
    check(**{name: taken})
    with pytest.raises(Failure) as caught:
        check(**{name: beyond})

    assert caught.value.param == name


def _keywords(told: Any) -> set[str]:
    """All those of a schema."""
    if isinstance(told, list):
        return {keyword for one in told for keyword in _keywords(one)}
    return told.keys() | _keywords([*told.values()]) if isinstance(told, dict) else set()


def test_document_requires_messages_and_text_parts() -> None:
    assert SCHEMAS["ChatBody"]["properties"]["messages"]["minItems"] == 1
    assert SCHEMAS["Part"]["properties"]["type"]["enum"] == ["text"]
    for messages in ([], [{"role": "user", "content": [{"type": "image_url"}]}]):
        with pytest.raises(Failure):
            parse_chat(json.dumps({"model": "m", "messages": messages}).encode()).to_request()


@pytest.mark.parametrize(
    ("name", "most"), [("active_decode_blocks_threshold", 1), ("active_prefill_tokens_threshold", TOKENS_MAX)]
)
def test_documented_ranges_of_thresholds_are_the_checked_ranges(name: str, most: int) -> None:
    field = THRESHOLDS[name]
    one = SCHEMAS["ThresholdsChange"]["properties"][name]["anyOf"][0]

    assert (one["minimum"], one["maximum"]) == (0, most)
    for value in (0, most):
        Thresholds(**{field: value})
    for value in (-1, most + 1):
        with pytest.raises(Failure):
            Thresholds(**{field: value})
