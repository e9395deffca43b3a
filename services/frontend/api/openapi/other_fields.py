"""Adds to the schemas of request bodies what the types do not say: fields that are accepted but not honoured."""

from collections.abc import Mapping
from typing import Any

from services.frontend.api.openai.other_fields import Other
from services.frontend.api.openai.parse import PLACES

_ONLY_NULL = {"type": "null"}


def add_other_fields(schemas: Mapping[str, dict[str, Any]], *, ignores_unknown: bool) -> None:
    """Change the schemas of all structs that are checked field by field. `ignores_unknown`: see check_fields."""
    for name, schema in schemas.items():
        if place := PLACES.get(name):
            schema["properties"] |= {field: _described(other) for field, other in sorted(place.others.items())}
            schema["additionalProperties"] = True if ignores_unknown else _ONLY_NULL


def _described(other: Other) -> dict[str, Any]:
    if other.has_no_effect:
        return {"description": "Has no effect."}
    return {"enum": [None, *other.neutral], "description": "Other values are not supported."}
