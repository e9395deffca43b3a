"""Hooks for the document as it is served."""

from collections.abc import Mapping
from typing import Any

import schemathesis

UNKNOWN = "x-schemathesis-unknown-property"
NOT_HONOURED = {"Has no effect.", "Other values are not supported."}
"""Descriptions of fields that are accepted but not honoured."""
SAMPLED = 10
"""Every tenth of them is tried: there are some 200, and tests/frontend/api/openai tries each."""


@schemathesis.hook  # type: ignore[untyped-decorator]
def before_load_schema(context: Any, raw_schema: dict[str, Any]) -> None:
    """Change the document before cases are generated from it."""
    for shape in raw_schema["components"]["schemas"].values():
        fields = shape.get("properties", {})
        others = [name for name, field in fields.items() if field.get("description") in NOT_HONOURED]
        for index, name in enumerate(others):
            if index % SAMPLED:
                del fields[name]


@schemathesis.hook  # type: ignore[untyped-decorator]
def filter_case(context: Any, case: Any) -> bool:
    """Skip cases with headers that the document does not list: it cannot forbid them, so they are not errors."""
    headers: Mapping[str, str] = case.headers or {}
    return UNKNOWN not in headers
