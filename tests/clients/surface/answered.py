"""Hooks that make most cases such as the mocker answers, and at once. What they leave out is right as well."""

from typing import Any

import schemathesis
from named import BODIES

FEW = {"enum": [1, 2, 3, 4, 5, 6, 7, 8]}
"""Each by name: an integer may be 1.0 to JSON Schema, and may not to OpenAI."""
TIMEOUT_S_MIN = 30
"""Enough for any answer, on a busy machine, too."""
NOT_OF_MOCKERS = (
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
    "response_format",
)


@schemathesis.hook  # type: ignore[untyped-decorator]
def before_load_schema(context: Any, raw_schema: dict[str, Any]) -> None:
    """Change the document before cases are made of it."""
    shapes = raw_schema["components"]["schemas"]
    for body in BODIES:
        fields = shapes[body]["properties"]
        for name in NOT_OF_MOCKERS:
            del fields[name]
        fields["n"] = fields["max_tokens"] = FEW
        shapes[body]["required"].append("max_tokens")
    del shapes["ChatBody"]["properties"]["max_completion_tokens"]  # The same as max_tokens: one of them is taken.
    require(shapes["ChatMessage"], "content")  # OpenAI has messages without, where tools are called.
    require(shapes["Part"], "text")  # It has parts without, which are no text.
    for methods in raw_schema["paths"].values():
        for operation in methods.values():
            for parameter in operation["parameters"]:
                if parameter["name"] == "X-Request-Timeout":
                    parameter["schema"]["minimum"] = TIMEOUT_S_MIN


def require(shape: dict[str, Any], name: str) -> None:
    """Have the field in every case, and not as null."""
    shape["required"].append(name)
    shape["properties"][name]["anyOf"].remove({"type": "null"})
