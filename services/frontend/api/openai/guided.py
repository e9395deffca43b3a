"""Guided decoding: the fields with which OpenAI's and vLLM's clients restrict an answer to a form."""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from services.core.errors import Failure, invalid, quoted
from services.core.json.keys import check_keys
from services.core.json.text import syntax_fault, with_whole_characters
from services.core.request import Guided, GuidedKind

Schema = dict[str, Any] | str
"""A JSON schema, or its JSON text."""


class JsonSchema(Struct, frozen=True, kw_only=True):
    """The `json_schema` of OpenAI's response format. An answer always follows the schema, `strict` or not."""

    name: str | None = None
    schema: dict[str, Any]
    strict: bool | None = None


class ResponseFormat(Struct, frozen=True, kw_only=True):
    """OpenAI's `response_format`."""

    type: str
    json_schema: JsonSchema | None = None

    def to_guided(self) -> Guided | None:
        """The form of the answer; None: any text. Raises Failure(INVALID_ARGUMENT)."""
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
    """vLLM's `structured_outputs`. Exactly one field must be set."""

    json: Schema | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def to_guided(self) -> dict[str, Guided]:
        """The forms that are set, by field name. Raises Failure(INVALID_ARGUMENT) if none is."""
        found = guided_of("structured_outputs.", self.json, self.regex, self.choice, self.grammar)
        if self.json_object:
            found["structured_outputs.json_object"] = Guided(GuidedKind.JSON_OBJECT)
        if not found:
            raise invalid("structured_outputs", "structured_outputs asks for nothing: set one of its fields")
        return found


def guided_of(
    prefix: str, json: Schema | None, regex: str | None, choice: list[str] | None, grammar: str | None
) -> dict[str, Guided]:
    """The forms of vLLM's four kinds that are set, by field name: `prefix` and kind."""
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
    """The form, or None if there is none. Raises Failure(INVALID_ARGUMENT) if there are several."""
    match list(forms):
        case []:
            return None
        case [name]:
            return forms[name]
        case [first, second, *_]:
            raise invalid(second, f"{first} and {second} exclude each other: set one of them")
    raise AssertionError("unreachable: a list has no items, one, or more")


def _json_schema(name: str, schema: Schema) -> Guided:
    """The schema as compact JSON. Raises Failure(INVALID_ARGUMENT) for a string that is not a JSON object."""
    return Guided(GuidedKind.JSON_SCHEMA, (_compact(name, schema),))


def _compact(name: str, schema: Schema) -> str:
    try:
        value = _object_of(name, schema) if isinstance(schema, str) else schema
        return msgspec.json.encode(value).decode()
    except RecursionError as error:
        raise _no_schema(name, "is nested too deeply: send a flatter schema") from error


def _object_of(name: str, schema: str) -> dict[str, Any]:
    text = with_whole_characters(schema.encode())
    try:
        value = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.ValidationError as error:
        raise _no_schema(name, f"is not a JSON object: {error}") from error
    except msgspec.DecodeError as error:
        raise _no_schema(name, f"is not a JSON object: {syntax_fault(text, error)}") from error
    check_keys(text, name)
    return value


def _no_schema(name: str, problem: str) -> Failure:
    return invalid(name, f"{name} {problem}")
