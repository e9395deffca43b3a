"""Hooks that keep most cases to requests that the mocker answers at once. What they leave out is valid as well."""

from typing import Any

import schemathesis
from named import BODIES

FEW = {"enum": [1, 2, 3, 4, 5, 6, 7, 8]}
"""Integer fields by name: JSON Schema accepts 1.0 as an integer, and OpenAI does not."""
TIMEOUT_S_MIN = 30
"""Long enough for any answer, even on a busy machine."""
NOT_OF_MOCKERS = (
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
    "response_format",
    "json_schema",
    "regex",
    "grammar",
    "ebnf",
)
OTHER_LIMITS = ("max_completion_tokens", "n_predict", "max_new_tokens")
"""Other names of max_tokens. Only equal values are accepted."""


@schemathesis.hook  # type: ignore[untyped-decorator]
def before_load_schema(context: Any, raw_schema: dict[str, Any]) -> None:
    """Change the document before cases are generated from it."""
    shapes = raw_schema["components"]["schemas"]
    for body in BODIES:
        fields = shapes[body]["properties"]
        for name in (*NOT_OF_MOCKERS, *OTHER_LIMITS):
            del fields[name]
        fields["n"] = fields["max_tokens"] = FEW
        shapes[body]["required"].append("max_tokens")
    require(shapes["ChatMessage"], "content")  # OpenAI allows messages without content where tools are called.
    require(shapes["Part"], "text")  # OpenAI allows parts that are not text.
    for methods in raw_schema["paths"].values():
        for operation in methods.values():
            for parameter in operation["parameters"]:
                if parameter["name"] == "X-Request-Timeout":
                    parameter["schema"]["minimum"] = TIMEOUT_S_MIN


def require(shape: dict[str, Any], name: str) -> None:
    """Require the field in every case, and not null."""
    shape["required"].append(name)
    shape["properties"][name]["anyOf"].remove({"type": "null"})
