"""Guided decoding: the fields with which OpenAI's and vLLM's clients restrict an answer to a form."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from services.core.errors import Failure, invalid, quoted
from services.core.json.keys import check_keys
from services.core.json.text import syntax_fault, with_whole_characters
from services.core.request import Guided, GuidedKind

Schema = dict[str, Any] | str
"""A JSON schema, or its JSON text."""


class JsonSchema(Struct, frozen=True, kw_only=True):
    """The `json_schema` of OpenAI's response format. An answer always follows the schema, `strict` or not."""

    name: str | None = None
    description: str | None = None
    schema: Schema
    strict: bool | None = None


FORMS_OF_TYPES: Mapping[str, tuple[str, ...]] = {
    "text": (),
    "json_object": ("schema", "value"),
    "json_schema": ("json_schema", "schema"),
    "json": ("schema", "value"),
    "regex": ("regex", "value"),
    "grammar": ("grammar",),
    "ebnf": ("ebnf",),
}
"""The types of a response format, and the fields that may have the form. All but the first two types need one."""
_FREE = ("text", "json_object")
TGI_TYPES = ("json", "json_object", "json_schema", "regex")
"""The types of TGI's `grammar`. `json_object` is another name of `json`."""


class ResponseFormat(Struct, frozen=True, kw_only=True):
    """OpenAI's `response_format`, with the types of other servers: `json`, `regex`, `grammar` and `ebnf`.

    `schema`: llama.cpp's and TensorRT-LLM's field. `value`: TGI's, for a schema or a regular expression. `grammar` and
    `ebnf`: a grammar in GBNF.
    """

    type: Annotated[str, Meta(extra_json_schema={"enum": [*FORMS_OF_TYPES]})]
    json_schema: JsonSchema | None = None
    schema: Schema | None = None
    value: Schema | None = None
    regex: str | None = None
    grammar: str | None = None
    ebnf: str | None = None

    def to_guided(self) -> dict[str, Guided]:
        """The forms that are given, by the path of their field; none: any text. Raises Failure(INVALID_ARGUMENT)."""
        fields = FORMS_OF_TYPES.get(self.type)
        if fields is None:
            detail = f"response_format.type {quoted(self.type)} is not supported: send {', '.join(FORMS_OF_TYPES)}"
            raise invalid("response_format.type", detail)
        forms = self._forms()
        for name in forms:
            if name.removeprefix("response_format.") not in fields:
                raise invalid("response_format.type", f"{name} does not fit response_format.type {quoted(self.type)}")
        if forms:
            return forms
        if self.type not in _FREE:
            raise invalid(f"response_format.{fields[0]}", f"response_format.{fields[0]} is required: add it")
        return {"response_format": Guided(GuidedKind.JSON_OBJECT)} if self.type == "json_object" else {}

    def _forms(self) -> dict[str, Guided]:
        """The forms that are given, by the path of their field."""
        found: dict[str, Guided] = {}
        if self.json_schema is not None:
            found["response_format.json_schema"] = _json_schema(
                "response_format.json_schema.schema", self.json_schema.schema
            )
        if self.schema is not None:
            found["response_format.schema"] = _json_schema("response_format.schema", self.schema)
        if self.value is not None:
            found["response_format.value"] = self._value(self.value)
        if self.regex is not None:
            found["response_format.regex"] = Guided(GuidedKind.REGEX, (self.regex,))
        for name, grammar in (("grammar", self.grammar), ("ebnf", self.ebnf)):
            if grammar is not None:
                found[f"response_format.{name}"] = Guided(GuidedKind.GRAMMAR, (grammar,))
        return found

    def _value(self, value: Schema) -> Guided:
        if self.type != "regex":
            return _json_schema("response_format.value", value)
        if not isinstance(value, str):
            raise invalid("response_format.value", "response_format.value must be a string: a regular expression")
        return Guided(GuidedKind.REGEX, (value,))


class TgiGrammar(Struct, frozen=True, kw_only=True):
    """TGI's `grammar`. `value`: a schema; with the type `json_schema`, a schema in its `schema`; or an expression."""

    type: Annotated[str, Meta(extra_json_schema={"enum": [*TGI_TYPES]})]
    value: Schema

    def to_guided(self) -> dict[str, Guided]:
        """The form, by the path of its field. Raises Failure(INVALID_ARGUMENT)."""
        path, value = "grammar.value", self.value
        if self.type not in TGI_TYPES:
            detail = f"grammar.type {quoted(self.type)} is not supported: send {', '.join(TGI_TYPES)}"
            raise invalid("grammar.type", detail)
        if self.type == "regex":
            if not isinstance(value, str):
                raise invalid(path, f"{path} must be a string: a regular expression")
            return {path: Guided(GuidedKind.REGEX, (value,))}
        if self.type == "json_schema":
            schema = value.get("schema") if isinstance(value, dict) else None
            path = f"{path}.schema"
            if not isinstance(schema, dict | str):
                raise invalid(path, f"{path} is required: give a JSON schema")
            value = schema
        return {path: _json_schema(path, value)}


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


def top_level_guided(
    json_schema: Schema | None, regex: str | None, grammar: str | TgiGrammar | None, ebnf: str | None
) -> dict[str, Guided]:
    """The forms in the fields of llama.cpp (`json_schema`, `grammar`), TGI (`grammar`) and SGLang (`regex`, `ebnf`).

    By the path of the field.
    """
    if json_schema is None and regex is None and grammar is None and ebnf is None:
        return {}
    found: dict[str, Guided] = {}
    if json_schema is not None:
        if isinstance(json_schema, dict) and isinstance(json_schema.get("schema"), dict):
            detail = "json_schema is a schema, and this is the json_schema of a response format: use response_format"
            raise invalid("json_schema", detail)
        found["json_schema"] = _json_schema("json_schema", json_schema)
    if regex is not None:
        found["regex"] = Guided(GuidedKind.REGEX, (regex,))
    if isinstance(grammar, TgiGrammar):
        found |= grammar.to_guided()
    elif grammar:  # llama.cpp's clients send "" for none.
        found["grammar"] = Guided(GuidedKind.GRAMMAR, (grammar,))
    if ebnf is not None:
        found["ebnf"] = Guided(GuidedKind.GRAMMAR, (ebnf,))
    return found


def only_one(forms: Mapping[str, Guided]) -> Guided | None:
    """The form, or None if there is none. Raises Failure(INVALID_ARGUMENT) if there are several that differ."""
    found = list(forms.items())
    for name, form in found[1:]:
        if form != found[0][1]:
            raise invalid(name, f"{found[0][0]} and {name} exclude each other: set one of them")
    return found[0][1] if found else None


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
