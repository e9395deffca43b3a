"""Hooks that use the existing model: with a random name, every answer is a 404."""

from typing import Any

import schemathesis
import served  # noqa: F401  # For its hooks.

MODEL = "mocker"
BODIES = ("CompletionBody", "ChatBody")


@schemathesis.hook  # type: ignore[untyped-decorator]
def before_load_schema(context: Any, raw_schema: dict[str, Any]) -> None:
    """Change the document before cases are generated from it."""
    for body in BODIES:
        raw_schema["components"]["schemas"][body]["properties"]["model"] = {"enum": [MODEL]}
