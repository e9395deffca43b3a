"""Hooks for the document as it is served."""

from collections.abc import Mapping
from typing import Any

import schemathesis

UNKNOWN = "x-schemathesis-unknown-property"


@schemathesis.hook  # type: ignore[untyped-decorator]
def filter_case(context: Any, case: Any) -> bool:
    """Skip cases with headers that the document does not list: it cannot forbid them, so they are not errors."""
    headers: Mapping[str, str] = case.headers or {}
    return UNKNOWN not in headers
