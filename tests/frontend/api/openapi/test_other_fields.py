"""The document lists every field of a body, and says what else is accepted."""

from typing import Any

import pytest

from services.frontend.api.openai.parse import PLACES
from services.frontend.api.openapi.document import describe
from services.http.server.config import HttpConfig, UnknownFields

LISTED = [("/v1/completions", "POST"), ("/v1/chat/completions", "POST")]


def schemas_of(config: HttpConfig) -> dict[str, Any]:
    schemas: dict[str, Any] = describe(LISTED, config).components["schemas"]
    return schemas


@pytest.mark.parametrize("struct", PLACES)
def test_every_field_is_listed(struct: str) -> None:
    place = PLACES[struct]

    assert set(schemas_of(HttpConfig())[struct]["properties"]) == place.honoured | place.others.keys()


@pytest.mark.parametrize(
    ("unknown_fields", "is_open"), [("refuse", False), ("refuse-misspelt", True), ("ignore", True)]
)
def test_document_says_if_unknown_fields_may_be_anything_but_null(unknown_fields: UnknownFields, is_open: bool) -> None:
    schemas = schemas_of(HttpConfig(unknown_fields=unknown_fields))

    for struct, place in PLACES.items():
        expected: Any = True if is_open and not place.is_strict else {"type": "null"}
        assert schemas[struct]["additionalProperties"] == expected


def test_fields_list_the_values_that_are_accepted() -> None:
    fields = schemas_of(HttpConfig())["ChatBody"]["properties"]

    assert fields["beam_width"]["enum"] == [None, 1]
    assert fields["tool_choice"]["enum"] == [None, "none", "auto"]
    assert "enum" not in fields["metadata"]


def test_fields_say_which_others_decide_on_their_values() -> None:
    fields = schemas_of(HttpConfig())["ChatBody"]["properties"]

    assert fields["best_of"] == {"description": "Values other than that of `n` and 1 are not supported."}
    assert fields["repeat_last_n"]["description"].startswith("Not supported with presence_penalty, ")
