"""Adds to the schemas of request bodies what the types do not say: fields that are accepted but not honoured."""

from collections.abc import Mapping
from typing import Any

from services.frontend.api.openai.other_fields import Other
from services.frontend.api.openai.parse import PLACES
from services.http.server.config import UnknownFields

_ONLY_NULL = {"type": "null"}


def add_other_fields(schemas: Mapping[str, dict[str, Any]], unknown_fields: UnknownFields) -> None:
    """Change the schemas of all structs that are checked field by field. `unknown_fields`: see HttpConfig."""
    for name, schema in schemas.items():
        if place := PLACES.get(name):
            schema["properties"] |= {field: _described(other) for field, other in sorted(place.others.items())}
            is_closed = place.is_strict or unknown_fields == "refuse"
            schema["additionalProperties"] = _ONLY_NULL if is_closed else True


def _described(other: Other) -> dict[str, Any]:
    if other.has_no_effect:
        return {"description": "Has no effect."}
    if other.detail_of:
        return {"description": f"Not supported with {', '.join(other.detail_of)}; has no effect without them."}
    if other.neutral_like:
        return {"description": f"Values other than that of `{other.neutral_like}` and 1 are not supported."}
    return {"enum": [None, *other.neutral], "description": "Other values are not supported."}
