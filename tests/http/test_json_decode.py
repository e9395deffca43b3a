"""A body that does not fit is refused with the path of the field and one sentence on what to change."""

import pytest
from msgspec.json import Decoder

from services.core.errors import Failure, Reason
from services.frontend.api.openai.bodies import ChatBody, CompletionBody
from services.frontend.api.openai.parse import parse_completion
from services.http.json_decode import decode, misfit

DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.parametrize(
    ("body", "param", "detail"),
    [
        (b'{"prompt":"x"}', "model", "model is required: add it"),
        (b'{"model":1,"prompt":"x"}', "model", "model must be a string, not a number"),
        (b'{"model":"m"}', "prompt", "prompt is required: add it"),
        (b'{"model":"m","prompt":null}', "prompt", "prompt must be a string or a list, not null"),
        (
            b'{"model":"m","prompt":[1.5]}',
            "prompt[0]",
            "prompt[0] must be a whole number or a string or a list",
        ),
        (b'{"model":"m","prompt":[-1]}', "prompt[0]", "prompt[0] must be >= 0"),
        (b'{"model":"m","prompt":[4294967296]}', "prompt[0]", "prompt[0] must be <= 4294967295"),
        (
            b'{"model":"m","prompt":"x","max_tokens":"5"}',
            "max_tokens",
            "max_tokens must be a whole number, not a string",
        ),
        (b'{"model":"m","prompt":"x","max_tokens":1.5}', "max_tokens", "max_tokens must be a whole number"),
        (b'{"model":"m","prompt":"x","stream":1}', "stream", "stream must be true or false, not a number"),
        (
            b'{"model":"m","prompt":"x","temperature":1e999}',
            "temperature",
            "temperature is invalid: number out of range",
        ),
        (b'{"model":"m","prompt":"x","stop":[1]}', "stop[0]", "stop[0] must be a string, not a number"),
        (
            b'{"model":"m","prompt":"x","logit_bias":{"1":"x"}}',
            "logit_bias[...]",
            "logit_bias[...] must be a number, not a string",
        ),
        (
            b'{"model":"m","prompt":"x","stream_options":{"include_usage":"yes"}}',
            "stream_options.include_usage",
            "stream_options.include_usage must be true or false, not a string",
        ),
    ],
)
def test_field_of_the_wrong_type_or_range_is_refused_by_its_path(body: bytes, param: str, detail: str) -> None:
    with pytest.raises(Failure) as caught:
        decode(body, Decoder(CompletionBody))

    assert (caught.value.param, caught.value.detail) == (param, detail)
    assert caught.value.reason is Reason.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        (b"", "the body is not valid JSON"),
        (b'{"model":', "the body is not valid JSON"),
        (b"model=m&prompt=x", "the body is not valid JSON"),
        (b'{"model":"m","prompt":"x"} {}', "the body is not valid JSON"),
        (b'{"model":"m","prompt":"x","temperature":NaN}', "the body is not valid JSON"),
        (b'{"model":"m","prompt":"\\ud800"}', "the body is not valid JSON"),
        (b"[]", "the body must be a JSON object"),
        (b"null", "the body must be a JSON object"),
        (b'{"model":"m","prompt":"\xff"}', "the body is not UTF-8"),
        (b'{"model":"m","prompt":"x","nobody_reads_this":"\xff"}', "the body is not UTF-8"),
        (b'{"model":"m","prompt":"x","stream_options":{"nobody_reads_this":"\xff"}}', "the body is not UTF-8"),
        (b'{"model":"m","prompt":"x","deep":' + DEEP + b"}", "the body is nested too deeply"),
    ],
)
def test_body_that_is_not_a_json_object_is_refused(body: bytes, detail: str) -> None:
    with pytest.raises(Failure, match=detail) as caught:
        parse_completion(body)

    assert caught.value.reason is Reason.INVALID_ARGUMENT
    assert caught.value.param is None


def test_missing_field_inside_a_list_is_named_by_its_whole_path() -> None:
    with pytest.raises(Failure) as caught:
        decode(b'{"model":"m","messages":[{"role":"user"},{"content":"x"}]}', Decoder(ChatBody))

    assert caught.value.param == "messages[1].role"


def test_unknown_message_of_msgspec_is_passed_on() -> None:
    failure = misfit("Invalid enum value 'x' - at `$.a.b`")

    assert (failure.param, failure.detail) == ("a.b", "a.b is invalid: invalid enum value 'x'")
