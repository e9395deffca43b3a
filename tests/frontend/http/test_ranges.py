"""Ranges: what the OpenAPI document tells of a field is what is checked, at the very bound."""

import json
from typing import Any

import msgspec
import pytest

from services.errors import Failure
from services.frontend.http.openai import CompletionBody, parse_completion
from services.validate import RANGES, check_request

PROPERTIES = msgspec.json.schema_components([CompletionBody])[1]["CompletionBody"]["properties"]
TOLD = {
    name: {bound: value for one in told.get("anyOf", ()) for bound, value in one.items() if "imum" in bound}
    for name, told in PROPERTIES.items()
}
BOUNDS = [(name, bound, value) for name, told in TOLD.items() for bound, value in told.items()]


def check(**fields: Any) -> None:
    check_request(parse_completion(json.dumps({"model": "m", "prompt": "hi"} | fields).encode()).to_request())


def test_every_range_of_sampling_is_told() -> None:
    assert {name for name in RANGES if not TOLD[name]} == set()


@pytest.mark.parametrize(("name", "bound", "value"), BOUNDS)
def test_a_value_at_its_bound_is_taken_and_one_beyond_is_not(name: str, bound: str, value: Any) -> None:
    step = 1 if PROPERTIES[name]["anyOf"][0]["type"] == "integer" else 0.001
    beyond = value if bound == "exclusiveMinimum" else value + step if bound == "maximum" else value - step

    check(**{name: value + step if bound == "exclusiveMinimum" else value})
    with pytest.raises(Failure) as caught:
        check(**{name: beyond})

    assert caught.value.param == name
