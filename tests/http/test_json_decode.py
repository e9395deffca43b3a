"""A body that does not fit is refused with the path of the field and one sentence on what to change."""

import pytest
from msgspec.json import Decoder

from services.core.errors import Failure, Reason
from services.core.json.text import REPAIRED_BYTES_MAX
from services.frontend.api.openai.bodies import ChatBody, CompletionBody
from services.frontend.api.openai.parse import parse_completion
from services.http.json_decode import decode, misfit

DEEP = b"[" * 16_000 + b"]" * 16_000


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
        (b'{"model":"m","prompt":[-1]}', "prompt[0]", "prompt[0] must be at least 0"),
        (b'{"model":"m","prompt":[4294967296]}', "prompt[0]", "prompt[0] must be at most 4294967295"),
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
        (b"", "the body is not valid JSON: it is empty"),
        (b'{"model":"m","prompt":"x"}'.decode().encode("utf-16"), "the body is not UTF-8 but UTF-16"),
        (b'{"model":"m","prompt":"x","user":"a\tb"}', r"a raw control character .* at byte 35"),
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


@pytest.mark.parametrize("written", ["16.0", "1.6e1", "160E-1", "16"])
def test_whole_number_counts_however_it_is_written(written: str) -> None:
    """Bug: "16.0" was refused, which is how Gson and Dart write 16."""
    body = f'{{"model":"m","prompt":[1,{written}],"max_tokens":{written},"min_p":0.5,"user":"16.0"}}'

    parsed = decode(body.encode(), Decoder(CompletionBody))

    assert (parsed.max_tokens, parsed.prompt, parsed.min_p, parsed.user) == (16, [1, 16], 0.5, "16.0")
    assert isinstance(parsed.max_tokens, int)


def test_long_body_must_have_its_whole_numbers_in_digits() -> None:
    """Bug in the making: to rewrite 64 MiB of them takes half a minute."""
    body = f'{{"model":"m","prompt":"{"x" * REPAIRED_BYTES_MAX}","n":2.0}}'.encode()

    with pytest.raises(Failure) as caught:
        decode(body, Decoder(CompletionBody))

    assert (caught.value.param, caught.value.detail) == ("n", "n must be a whole number, written in digits")


@pytest.mark.parametrize("written", ["1e30", "-1e300", "1e22", "12345678901234567890123.0"])
def test_whole_number_that_is_too_large_is_out_of_range(written: str) -> None:
    """Its message must not deny that it is a whole number."""
    with pytest.raises(Failure) as caught:
        decode(f'{{"model":"m","prompt":"x","n":1.0,"seed":{written}}}'.encode(), Decoder(CompletionBody))

    assert (caught.value.param, caught.value.detail) == ("seed", "seed is out of range: send a smaller number")


@pytest.mark.parametrize("written", ["18446744073709551615", "18446744073709551615.0"])
def test_large_number_keeps_its_exact_value(written: str) -> None:
    parsed = decode(f'{{"model":"m","prompt":"x","seed":{written}}}'.encode(), Decoder(CompletionBody))

    assert parsed.seed == 2**64 - 1


@pytest.mark.parametrize("name", ["max_tokens", "seed", "n", "top_k", "logprobs"])
@pytest.mark.parametrize("number", ["1" * 5000, "-" + "1" * 5000, "1e999", "1" + "0" * 5000 + ".0", "0.5"])
def test_no_number_raises_anything_but_a_failure(name: str, number: str) -> None:
    with pytest.raises(Failure) as caught:
        decode(f'{{"model":"m","prompt":"x","{name}":{number}}}'.encode(), Decoder(CompletionBody))

    assert caught.value.param == name


def test_missing_field_inside_a_list_is_named_by_its_whole_path() -> None:
    with pytest.raises(Failure) as caught:
        decode(b'{"model":"m","messages":[{"role":"user"},{"content":"x"}]}', Decoder(ChatBody))

    assert caught.value.param == "messages[1].role"


def test_unknown_message_of_msgspec_is_passed_on() -> None:
    failure = misfit("Invalid enum value 'x' - at `$.a.b`")

    assert (failure.param, failure.detail) == ("a.b", "a.b is invalid: invalid enum value 'x'")
