"""Hooks that name the model that is there: with a random one, the answer is a 404 whatever else is asked."""

from typing import Any

import schemathesis
import served  # noqa: F401  # Its hooks are wanted, too.

MODEL = "mocker"
BODIES = ("CompletionBody", "ChatBody")


@schemathesis.hook  # type: ignore[untyped-decorator]
def before_load_schema(context: Any, raw_schema: dict[str, Any]) -> None:
    """Change the document before cases are made of it."""
    for body in BODIES:
        raw_schema["components"]["schemas"][body]["properties"]["model"] = {"enum": [MODEL]}
