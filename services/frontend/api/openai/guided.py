"""The ways in which OpenAI's and vLLM's clients hold an answer to a form."""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from services.core.errors import Failure, invalid, quoted
from services.core.request import Guided, GuidedKind

Schema = dict[str, Any] | str
"""A JSON schema, or its JSON text."""


class JsonSchema(Struct, frozen=True, kw_only=True):
    """OpenAI's. An answer is always held to its schema, `strict` or not."""

    name: str | None = None
    schema: dict[str, Any]
    strict: bool | None = None


class ResponseFormat(Struct, frozen=True, kw_only=True):
    """OpenAI's `response_format`."""

    type: str
    json_schema: JsonSchema | None = None

    def to_guided(self) -> Guided | None:
        """None: any text. Raises Failure(INVALID_ARGUMENT)."""
        match self.type, self.json_schema:
            case "text", None:
                return None
            case "json_object", None:
                return Guided(GuidedKind.JSON_OBJECT)
            case "json_schema", JsonSchema(schema=schema):
                return _json_schema("response_format.json_schema.schema", schema)
            case "json_schema", None:
                raise invalid("response_format.json_schema", "response_format.json_schema is required: add it")
            case (("text" | "json_object"), _):
                detail = 'response_format.json_schema needs response_format.type "json_schema"'
                raise invalid("response_format.type", detail)
        detail = f"response_format.type {quoted(self.type)} is not supported: send text, json_object or json_schema"
        raise invalid("response_format.type", detail)


class StructuredOutputs(Struct, frozen=True, kw_only=True):
    """vLLM's `structured_outputs`: one of its fields."""

    json: Schema | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def forms(self) -> dict[str, Guided]:
        """By name of the field. Raises Failure(INVALID_ARGUMENT) if there is none."""
        found = forms_of("structured_outputs.", self.json, self.regex, self.choice, self.grammar)
        if self.json_object:
            found["structured_outputs.json_object"] = Guided(GuidedKind.JSON_OBJECT)
        if not found:
            raise invalid("structured_outputs", "structured_outputs asks for nothing: set one of its fields")
        return found


def forms_of(
    prefix: str, json: Schema | None, regex: str | None, choice: list[str] | None, grammar: str | None
) -> dict[str, Guided]:
    """Those of vLLM's four kinds that are given, by name of the field: `prefix` and kind."""
    found: dict[str, Guided] = {}
    if json is not None:
        found[f"{prefix}json"] = _json_schema(f"{prefix}json", json)
    if regex is not None:
        found[f"{prefix}regex"] = Guided(GuidedKind.REGEX, (regex,))
    if choice is not None:
        found[f"{prefix}choice"] = Guided(GuidedKind.CHOICE, tuple(choice))
    if grammar is not None:
        found[f"{prefix}grammar"] = Guided(GuidedKind.GRAMMAR, (grammar,))
    return found


def only_one(forms: Mapping[str, Guided]) -> Guided | None:
    """The one that is given, if any. Raises Failure(INVALID_ARGUMENT) if there are more."""
    match list(forms):
        case []:
            return None
        case [name]:
            return forms[name]
        case [first, second, *_]:
            raise invalid(second, f"{first} and {second} exclude each other: give one of them")
    raise AssertionError("a list has no item, one or more")


def _json_schema(name: str, schema: Schema) -> Guided:
    """The schema as compact JSON. Raises Failure(INVALID_ARGUMENT) for a text that is no JSON object."""
    return Guided(GuidedKind.JSON_SCHEMA, (_compact(name, schema),))


def _compact(name: str, schema: Schema) -> str:
    try:
        value = msgspec.json.decode(schema, type=dict[str, Any]) if isinstance(schema, str) else schema
        return msgspec.json.encode(value).decode()
    except msgspec.DecodeError as error:
        raise _no_schema(name, f"is no JSON object: {error}") from error
    except RecursionError as error:
        raise _no_schema(name, "is nested too deeply: send a flatter schema") from error


def _no_schema(name: str, complaint: str) -> Failure:
    return invalid(name, f"{name} {complaint}")
