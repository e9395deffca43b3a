"""The document lists every field of a body, and says what else is accepted."""

from typing import Any

import pytest

from services.frontend.api.openai.parse import PLACES
from services.frontend.api.openapi.document import describe
from services.http.server.config import HttpConfig

LISTED = [("/v1/completions", "POST"), ("/v1/chat/completions", "POST")]


def schemas_of(config: HttpConfig) -> dict[str, Any]:
    schemas: dict[str, Any] = describe(LISTED, config).components["schemas"]
    return schemas


@pytest.mark.parametrize("struct", PLACES)
def test_every_field_is_listed_and_others_may_only_be_null(struct: str) -> None:
    schema = schemas_of(HttpConfig())[struct]

    assert set(schema["properties"]) == PLACES[struct].honoured | PLACES[struct].others.keys()
    assert schema["additionalProperties"] == {"type": "null"}


def test_fields_list_the_values_that_are_accepted() -> None:
    fields = schemas_of(HttpConfig())["ChatBody"]["properties"]

    assert fields["best_of"]["enum"] == [None, 1]
    assert fields["tool_choice"]["enum"] == [None, "none", "auto"]
    assert "enum" not in fields["metadata"]


def test_document_says_if_unknown_fields_are_ignored() -> None:
    schema = schemas_of(HttpConfig(ignores_unknown_fields=True))["ChatBody"]

    assert schema["additionalProperties"] is True
