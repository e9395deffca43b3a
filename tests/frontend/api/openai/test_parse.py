"""Fields that are not honoured are refused by name wherever they are, and too large ones by a bound."""

import json
from typing import Any

import pytest

from services.core.errors import Failure, Reason
from services.core.request import Message, Request
from services.core.validation import MESSAGES_MAX
from services.frontend.api.openai.endpoints import LARGE_BODY_BYTES
from services.frontend.api.openai.parse import parse_chat, parse_completion
from services.http.json_decode import FIELD_BYTES_MAX
from services.models.tokenizers.inside import CHARACTERS_INSIDE_MAX


def completion(**fields: Any) -> Request:
    return parse_completion(json.dumps({"model": "m", "prompt": "hi"} | fields).encode()).to_request()


def chat(*contents: Any, **fields: Any) -> Request:
    messages = [{"role": "user", "content": content} for content in contents or ("hi",)]
    return parse_chat(json.dumps({"model": "m", "messages": messages} | fields).encode()).to_request()


def refused(ask: Any, *contents: Any, **fields: Any) -> str | None:
    """The param with which `ask` refuses the fields."""
    with pytest.raises(Failure) as caught:
        ask(*contents, **fields)
    return caught.value.param


def test_fields_that_ask_for_nothing_are_accepted() -> None:
    nothing: dict[str, Any] = {"metadata": {"a": "b"}, "made_up": [1, {"x": None}], "tools": None, "store": True}
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}, "made_up": 1}

    assert completion(**nothing) == completion()
    assert chat(**nothing) == chat()
    for content in ("hi", [part]):
        message = {"role": "user", "content": content, "tool_calls": [], "refusal": None, "made_up": 1}
        assert chat(messages=[message]) == chat()


@pytest.mark.parametrize("ask", [completion, chat])
def test_misspelt_field_is_refused_by_name(ask: Any) -> None:
    assert refused(ask, temprature=0) == "temprature"
    assert refused(ask, maxTokens=5) == "maxTokens"


@pytest.mark.parametrize(
    "name",
    [
        *("temprature", "modle", "repeat_penality", "max_lenght", "max_output_token", "chat_template_kwarg"),
        *("thinks", "keepAlive"),
    ],
)
def test_name_like_that_of_any_known_field_is_refused_beside_the_right_ones(name: str) -> None:
    assert refused(chat, temperature=0, **{name: 1}) == name


@pytest.mark.parametrize(
    "name",
    [
        *("mode", "models", "tool", "tool_ids", "user_id", "chat_id", "session", "id", "message_id", "conversation_id"),
        *("tags", "files", "features", "variables", "background_tasks", "provider", "route", "transforms", "title"),
    ],
)
def test_names_that_clients_have_for_themselves_are_ignored(name: str) -> None:
    assert chat(**{name: 1}) == chat()


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        (
            {"model": "m", "messages": [{"role": "user", "content": "hi"}, {"rol": "user", "content": "hi"}]},
            "messages[1].role is required: add it. Did you mean role by 'rol'?",
        ),
        ({"modle": "m", "messages": []}, "model is required: add it. Did you mean model by 'modle'?"),
        ({"model": "m", "made_up": []}, "messages is required: add it"),
    ],
)
def test_misspelt_field_is_named_where_a_required_one_is_missing(body: Any, detail: str) -> None:
    with pytest.raises(Failure) as caught:
        parse_chat(json.dumps(body).encode())

    assert caught.value.detail == detail


NESTED: list[tuple[dict[str, Any], str]] = [
    ({"stream": True, "stream_options": {"include_usage": True, "made_up": 1}}, "stream_options.made_up"),
    ({"response_format": {"type": "json_object", "made_up": 1}}, "response_format.made_up"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "made_up": 1}}},
        "response_format.json_schema.made_up",
    ),
    ({"structured_outputs": {"regex": "a", "made_up": 1}}, "structured_outputs.made_up"),
]
IN_MESSAGES = [
    ({"role": "user", "content": "hi", "contnet": "x"}, "messages[1].contnet"),
    ({"role": "user", "content": "hi", "Name": "x"}, "messages[1].Name"),
    ({"role": "user", "content": [{"type": "text", "text": "hi", "Text": "x"}]}, "messages[1].content[0].Text"),
]


@pytest.mark.parametrize(("fields", "param"), NESTED)
@pytest.mark.parametrize("ask", [completion, chat])
def test_unknown_field_of_an_object_is_refused_by_its_path(ask: Any, fields: dict[str, Any], param: str) -> None:
    assert refused(ask, **fields) == param


@pytest.mark.parametrize(("message", "param"), IN_MESSAGES)
def test_misspelt_field_of_a_message_is_refused_by_its_path(message: dict[str, Any], param: str) -> None:
    assert refused(chat, messages=[{"role": "user", "content": "hi"}, message]) == param


def test_unknown_fields_can_all_be_refused_or_ignored() -> None:
    bodies = [
        (parse_completion, {"model": "m", "prompt": "hi", "made_up": 1, "maxTokens": 5}, "made_up"),
        (parse_chat, {"model": "m", "messages": [{"role": "user", "content": "hi", "Name": "x"}]}, "messages[0].Name"),
    ]
    for parse, body, param in bodies:
        parse(json.dumps(body).encode(), unknown_fields="ignore")
        with pytest.raises(Failure) as caught:
            parse(json.dumps(body).encode(), unknown_fields="refuse")

        assert caught.value.param == param


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prefix", True),
        ("partial", True),
        ("reasoning_content", "I think"),
        ("reasoning", "I think"),
        ("thinking_blocks", [{"thinking": "I think"}]),
        ("refusal", "No."),
        ("tool_calls", [{"id": "1"}]),
        ("function_call", {"name": "f"}),
        ("audio", {"id": "1"}),
        ("images", ["data"]),
        ("text", "and more"),
    ],
)
def test_field_of_a_message_that_would_be_dropped_is_refused(name: str, value: Any) -> None:
    message = {"role": "assistant", "content": "hi", name: value}

    assert refused(chat, messages=[message]) == f"messages[0].{name}"


def test_part_that_is_not_text_is_refused_by_its_type() -> None:
    part = {"type": "image_url", "image_url": {"url": "x"}}

    assert refused(chat, [part], metadata={}) == "messages[0].content[0].type"


@pytest.mark.parametrize(
    "fields",
    [
        {"model": None},
        {"n": "two"},
        {"temperature": "warm"},
        {"stop": [1]},
        {"logit_bias": {"x": 1}},
        {"stream_options": {"include_usage": True}},
        {"messages": [{"role": "user"}]},
        {"messages": [{"content": "hi"}]},
    ],
)
def test_errors_are_the_same_with_and_without_other_fields(fields: dict[str, Any]) -> None:
    """A body without other fields is decoded another way."""
    told = set()
    others: list[dict[str, Any]] = [{}, {"metadata": {}}]
    for more in others:
        with pytest.raises(Failure) as caught:
            chat(**fields, **more)
        told.add((caught.value.reason, caught.value.param, caught.value.detail))

    assert len(told) == 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ('{"model": "m", "model": "n", "messages": []}', "model"),
        ('{"model": "m", "messages": [], "n": 1, "n": null}', "n"),
        (r'{"model": "m", "messages": [], "max_tokens": 1, "max\u005ftokens": 2}', "max_tokens"),
        ('{"model": "m", "messages": [{"role": "user", "content": "a", "content": "b"}]}', "messages[0].content"),
        (
            '{"model": "m", "messages": [{"role": "user", "content": "a", "content": "b"}, {"role": "user"}]}',
            "messages[0].content",
        ),
        (
            '{"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "", "text": ""}]}]}',
            "messages[0].content[0].text",
        ),
        ('{"model": "m", "messages": [], "stream_options": {"include_usage": true, "include_usage": false}}', None),
        ('{"model": "m", "messages": [], "logit_bias": {"1": 1, "\\u0031": 2}}', "logit_bias.1"),
        (
            '{"model": "m", "messages": [], "guided_json": {"properties": {"a": {}, "a": {}}}}',
            "guided_json.properties.a",
        ),
        ('{"model": "m", "messages": [], "structured_outputs": {"regex": "a", "regex": "b"}}', None),
        ('{"model": "m", "messages": [], "made_up": {"a": 1, "a": 2}}', "made_up.a"),
        ('{"model": "m", "messages": [], "made_up": 1, "made_up": 2}', "made_up"),
    ],
)
def test_key_that_is_given_twice_is_refused_by_name(body: str, param: str | None) -> None:
    """Bug: the last value counted, and other parsers on the way may take the first."""
    with pytest.raises(Failure, match="is given twice: give it once") as caught:
        parse_chat(body.encode())

    if param is not None:
        assert caught.value.param == param


def test_byte_order_mark_and_half_a_surrogate_pair_are_accepted() -> None:
    """Half a pair is what JavaScript makes of an emoji when it cuts a text."""
    halved = rb'{"model": "m", "prompt": "A \ud83d", "stop": ["\ude00", "\ud83d\ude00"], "\ud83d": 1}'

    request = parse_completion(b"\xef\xbb\xbf" + halved).to_request()

    assert (request.text, request.stop.strings) == ("A \ufffd", ("\ufffd", "\N{GRINNING FACE}"))


@pytest.mark.parametrize("value", ["1e999", "-1e999", "9" * 5000, "[" * 5000 + "]" * 5000, '{"a": 1e999}'])
@pytest.mark.parametrize("name", ["best_of", "tools", "logit_bias", "truncate_prompt_tokens", "n", "made_up"])
def test_number_that_no_type_holds_is_refused_by_name(name: str, value: str) -> None:
    """Bug: best_of of 1e999 was answered with 500, and not counted."""
    for parse, prompt in ((parse_completion, '"prompt": "hi"'), (parse_chat, '"messages": []')):
        body = f'{{"model": "m", {prompt}, "{name}": {value}}}'.encode()
        if name == "made_up" and value[0] != "[":
            parse(body)
            continue
        with pytest.raises(Failure) as caught:
            parse(body)

        assert caught.value.reason is Reason.INVALID_ARGUMENT
        assert caught.value.param in {name, f"{name}[...]"} or value[0] == "["


def test_unsupported_fields_are_refused_by_name() -> None:
    assert refused(completion, best_of=2) == "best_of"
    assert refused(completion, top_logprobs=1) == "top_logprobs"
    assert refused(chat, tools=[{"type": "function"}]) == "tools"
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "x", "tool_calls": [{}]}]
    assert refused(chat, messages=messages) == "messages[1].tool_calls"
    assert (
        refused(completion, structured_outputs={"regex": "a", "structural_tag": "x"})
        == "structured_outputs.structural_tag"
    )


@pytest.mark.parametrize("name", ["logit_bias", "stop", "tools", "guided_json", "structured_outputs", "unknown"])
def test_large_field_is_refused_before_it_is_decoded(name: str) -> None:
    """Bug: a body full of biases, or of tools, was decoded first, which blocked all streams for seconds."""
    for parse, prompt in ((parse_completion, '"prompt": "hi"'), (parse_chat, '"messages": []')):
        body = f'{{"model": "m", {prompt}, "{name}": "{"x" * FIELD_BYTES_MAX}"}}'

        with pytest.raises(Failure, match="is longer than 1 MiB") as caught:
            parse(body.encode())

        assert caught.value.param == name


def test_prompt_may_be_larger() -> None:
    long = "x" * FIELD_BYTES_MAX

    assert completion(prompt=long).text == long
    assert chat(long).messages == (Message("user", long),)


def test_too_many_messages_are_refused() -> None:
    chat(*["x"] * MESSAGES_MAX)

    with pytest.raises(Failure, match=f"messages must have at most {MESSAGES_MAX} items") as caught:
        chat(*["x"] * (MESSAGES_MAX + 1))

    assert caught.value.param == "messages"


@pytest.mark.parametrize("size_bytes", [LARGE_BODY_BYTES, 300_000])
@pytest.mark.parametrize("parse", [parse_chat, parse_completion])
def test_body_with_too_many_values_is_refused_before_it_is_decoded(parse: Any, size_bytes: int) -> None:
    """Any text with enough brackets: nothing looks whether it is JSON."""
    with pytest.raises(Failure, match="has more than 16384 lists and objects"):
        parse(b"[" * size_bytes)


def test_large_prompts_are_parsed() -> None:
    """A chat message of 1 MiB with any marks in it, and 500 KiB of token ids."""
    content = 'He said: ["x", {\\}], ' * 50_000
    token_ids = list(range(100_000, 175_000))

    assert parse_chat(json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode())
    parsed = parse_completion(json.dumps({"model": "m", "prompt": token_ids}).encode())

    assert parsed.prompt == token_ids


def test_no_text_that_a_helper_tokenises_is_parsed_on_the_event_loop() -> None:
    assert LARGE_BODY_BYTES <= CHARACTERS_INSIDE_MAX
