"""OpenAI's and vLLM's fields for guided decoding mean the same, and only one may be set."""

import json
from typing import Any

import pytest

from services.core.errors import Failure
from services.core.request import Guided, GuidedKind
from services.frontend.api.openai.parse import parse_chat, parse_completion

SCHEMA = {"type": "object", "properties": {"ä": {"type": "integer"}}}
COMPACT = '{"type":"object","properties":{"ä":{"type":"integer"}}}'
JSON_SCHEMA = Guided(GuidedKind.JSON_SCHEMA, (COMPACT,))


def guided(**fields: Any) -> Guided | None:
    """The form that both endpoints read from the fields."""
    completion = parse_completion(json.dumps({"model": "m", "prompt": "hi"} | fields).encode()).to_request()
    messages = [{"role": "user", "content": "hi"}]
    chat = parse_chat(json.dumps({"model": "m", "messages": messages} | fields).encode()).to_request()
    assert completion.guided == chat.guided
    return completion.guided


def refusal(**fields: Any) -> tuple[str | None, str]:
    with pytest.raises(Failure) as caught:
        guided(**fields)
    return caught.value.param, caught.value.detail


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": None, "guided_json": None, "structured_outputs": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Guided(GuidedKind.JSON_OBJECT)),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, JSON_SCHEMA),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": True}}}, JSON_SCHEMA),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": json.dumps(SCHEMA)}}}, JSON_SCHEMA),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, JSON_SCHEMA),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}, "schema": SCHEMA}},
            JSON_SCHEMA,
        ),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, JSON_SCHEMA),
        ({"response_format": {"type": "json_object", "schema": None}}, Guided(GuidedKind.JSON_OBJECT)),
        ({"response_format": {"type": "json_object", "value": SCHEMA}}, JSON_SCHEMA),
        ({"response_format": {"type": "json", "value": json.dumps(SCHEMA)}}, JSON_SCHEMA),
        ({"response_format": {"type": "json", "schema": SCHEMA}}, JSON_SCHEMA),
        ({"response_format": {"type": "regex", "value": "[ab]+"}}, Guided(GuidedKind.REGEX, ("[ab]+",))),
        ({"response_format": {"type": "regex", "regex": "[ab]+"}}, Guided(GuidedKind.REGEX, ("[ab]+",))),
        ({"response_format": {"type": "grammar", "grammar": "g"}}, Guided(GuidedKind.GRAMMAR, ("g",))),
        ({"response_format": {"type": "ebnf", "ebnf": "g"}}, Guided(GuidedKind.GRAMMAR, ("g",))),
        ({"json_schema": SCHEMA}, JSON_SCHEMA),
        ({"json_schema": json.dumps(SCHEMA)}, JSON_SCHEMA),
        ({"grammar": 'root ::= "a"'}, Guided(GuidedKind.GRAMMAR, ('root ::= "a"',))),
        ({"grammar": ""}, None),
        ({"grammar": {"type": "json", "value": {"a": 1}}}, Guided(GuidedKind.JSON_SCHEMA, ('{"a":1}',))),
        ({"grammar": {"type": "json", "value": ' {"a": 1} '}}, Guided(GuidedKind.JSON_SCHEMA, ('{"a":1}',))),
        ({"grammar": {"type": "json_object", "value": {}}}, Guided(GuidedKind.JSON_SCHEMA, ("{}",))),
        (
            {"grammar": {"type": "json_schema", "value": {"name": "n", "schema": {"a": 1}}}},
            Guided(GuidedKind.JSON_SCHEMA, ('{"a":1}',)),
        ),
        ({"grammar": {"type": "regex", "value": "a+"}}, Guided(GuidedKind.REGEX, ("a+",))),
        ({"grammar": {"type": "regex", "value": "a+"}, "regex": "a+"}, Guided(GuidedKind.REGEX, ("a+",))),
        ({"ebnf": 'root ::= "a"'}, Guided(GuidedKind.GRAMMAR, ('root ::= "a"',))),
        ({"regex": "[ab]+"}, Guided(GuidedKind.REGEX, ("[ab]+",))),
        ({"regex": "a", "guided_regex": "a", "structured_outputs": {"regex": "a"}}, Guided(GuidedKind.REGEX, ("a",))),
        ({"guided_json": {}, "structured_outputs": {"json": {}}}, Guided(GuidedKind.JSON_SCHEMA, ("{}",))),
        ({"guided_json": SCHEMA}, JSON_SCHEMA),
        ({"guided_json": json.dumps(SCHEMA, indent=2)}, JSON_SCHEMA),
        ({"guided_regex": "[ab]+"}, Guided(GuidedKind.REGEX, ("[ab]+",))),
        ({"guided_choice": ["yes", "no"]}, Guided(GuidedKind.CHOICE, ("yes", "no"))),
        ({"guided_grammar": 'root ::= "a"'}, Guided(GuidedKind.GRAMMAR, ('root ::= "a"',))),
        ({"structured_outputs": {"json": SCHEMA}}, JSON_SCHEMA),
        ({"structured_outputs": {"json": COMPACT, "regex": None}}, JSON_SCHEMA),
        ({"structured_outputs": {"regex": "a"}}, Guided(GuidedKind.REGEX, ("a",))),
        ({"structured_outputs": {"choice": ["a"]}}, Guided(GuidedKind.CHOICE, ("a",))),
        ({"structured_outputs": {"grammar": "g"}}, Guided(GuidedKind.GRAMMAR, ("g",))),
        ({"structured_outputs": {"json_object": True}}, Guided(GuidedKind.JSON_OBJECT)),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}}, Guided(GuidedKind.REGEX, ("a",))),
    ],
)
def test_each_field_gives_its_form(fields: dict[str, Any], expected: Guided | None) -> None:
    assert guided(**fields) == expected


@pytest.mark.parametrize(
    ("fields", "first", "second"),
    [
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_json", "guided_regex"),
        ({"guided_choice": ["a"], "guided_grammar": "a"}, "guided_choice", "guided_grammar"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "response_format"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs.regex",
            "structured_outputs.choice",
        ),
        (
            {"structured_outputs": {"json": {}, "json_object": True}},
            "structured_outputs.json",
            "structured_outputs.json_object",
        ),
        ({"guided_json": {}, "structured_outputs": {"json": SCHEMA}}, "guided_json", "structured_outputs.json"),
        ({"json_schema": SCHEMA, "grammar": "g"}, "json_schema", "grammar"),
        ({"grammar": "g", "ebnf": "h"}, "grammar", "ebnf"),
        ({"response_format": {"type": "json_object"}, "json_schema": SCHEMA}, "response_format", "json_schema"),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA, "value": {}}},
            "response_format.schema",
            "response_format.value",
        ),
    ],
)
def test_two_different_forms_are_refused(fields: dict[str, Any], first: str, second: str) -> None:
    assert refusal(**fields) == (second, f"{first} and {second} exclude each other: set one of them")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format.type"),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}, "response_format.type"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.type"),
        ({"response_format": {"type": "json_object", "regex": "a"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema", "value": {"schema": {}}}}, "response_format.type"),
        ({"response_format": {"type": "structural_tag", "structures": []}}, "response_format.type"),
        ({"response_format": {"type": "regex", "pattern": "a"}}, "response_format.pattern"),
        ({"response_format": {"type": "json"}}, "response_format.schema"),
        ({"response_format": {"type": "regex"}}, "response_format.regex"),
        ({"response_format": {"type": "regex", "value": {"a": 1}}}, "response_format.value"),
        ({"response_format": {"type": "grammar"}}, "response_format.grammar"),
        ({"response_format": {"type": "ebnf"}}, "response_format.ebnf"),
        ({"json_schema": {"name": "x", "schema": {"type": "object"}}}, "json_schema"),
        ({"json_schema": "not json"}, "json_schema"),
        ({"grammar": {"type": "json"}}, "grammar.value"),
        ({"grammar": {"type": "json", "value": "not json"}}, "grammar.value"),
        ({"grammar": {"type": "json", "value": {}, "name": "n"}}, "grammar.name"),
        ({"grammar": {"type": "yaml", "value": "a"}}, "grammar.type"),
        ({"grammar": {"type": "regex", "value": {}}}, "grammar.value"),
        ({"grammar": {"type": "json_schema", "value": {"type": "object"}}}, "grammar.value.schema"),
        ({"grammar": ["a"]}, "grammar"),
        ({"regex": ["a"]}, "regex"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_json": "not json"}, "guided_json"),
        ({"guided_json": "[]"}, "guided_json"),
        ({"guided_json": '{"a": 1e999}'}, "guided_json"),
        ({"guided_json": '{"properties": {"a": {}, "a": {}}}'}, "guided_json.properties.a"),
        ({"guided_json": '{"a":' * 10_000 + "1" + "}" * 10_000}, "guided_json"),
        ({"guided_choice": "yes"}, "guided_choice"),
        ({"guided_choice": [1]}, "guided_choice[0]"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a", "structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ],
)
def test_unsupported_form_is_refused_by_its_path(fields: dict[str, Any], param: str) -> None:
    found, detail = refusal(**fields)

    assert found == param
    assert param in detail
