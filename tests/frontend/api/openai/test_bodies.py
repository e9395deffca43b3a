"""Bodies become requests: each field is used, has its documented default, or is refused by name."""

import itertools
import json
from typing import Any

import pytest

from services.core.errors import Failure, Reason, invalid
from services.core.request import Message, Request, Sampling, Stop
from services.core.validation import ANSWERS_MAX, COUNT_MAX, check_request
from services.frontend.api.openai.bodies import COMPLETION_TOKENS_DEFAULT, LIMITS
from services.frontend.api.openai.parse import parse_chat, parse_completion


def completion(**fields: Any) -> Request:
    return parse_completion(json.dumps({"model": "m", "prompt": "hi"} | fields).encode()).to_request()


def chat(*contents: Any, **fields: Any) -> Request:
    messages = [{"role": "user", "content": content} for content in contents or ("hi",)]
    return parse_chat(json.dumps({"model": "m", "messages": messages} | fields).encode()).to_request()


def refusal(ask: Any, *contents: Any, **fields: Any) -> tuple[str | None, str]:
    """The param and the message with which `ask` refuses the fields."""
    with pytest.raises(Failure) as caught:
        ask(*contents, **fields)
    assert caught.value.reason is Reason.INVALID_ARGUMENT
    return caught.value.param, caught.value.detail


def test_completion_has_the_documented_defaults() -> None:
    assert completion() == Request(model="m", text="hi", stop=Stop(max_tokens_default=COMPLETION_TOKENS_DEFAULT))


def test_chat_without_a_limit_may_fill_the_context() -> None:
    assert chat() == Request(model="m", messages=(Message("user", "hi"),))


def test_null_means_the_default() -> None:
    names = [
        "temperature",
        "top_p",
        "seed",
        "stop",
        "logit_bias",
        "max_tokens",
        "stream",
        "stream_options",
        "n",
        "logprobs",
        "response_format",
        "tools",
    ]

    assert completion(**dict.fromkeys(names)) == completion()


def test_every_sampling_field_is_converted() -> None:
    request = completion(
        temperature=0,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        seed=2**64 - 1,
        presence_penalty=1,
        frequency_penalty=-1.5,
        repetition_penalty=1.1,
        logit_bias={"7": -100, "0": 0.5},
    )

    assert request.sampling == Sampling(
        temperature=0.0,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        seed=2**64 - 1,
        presence_penalty=1.0,
        frequency_penalty=-1.5,
        repetition_penalty=1.1,
        logit_bias=((7, -100.0), (0, 0.5)),
    )


def test_every_stop_field_is_converted() -> None:
    request = completion(stop=["a", "b"], stop_token_ids=[1, 2], ignore_eos=True, min_tokens=3, max_tokens=9)

    assert request.stop == Stop(strings=("a", "b"), token_ids=(1, 2), ignore_eos=True, min_tokens=3, max_tokens=9)


def test_stop_may_be_a_single_string() -> None:
    assert completion(stop="end").stop.strings == ("end",)


def test_top_k_minus_one_keeps_all_tokens() -> None:
    assert completion(top_k=-1).sampling.top_k == 0


def test_top_k_beyond_any_vocabulary_keeps_all_tokens() -> None:
    """Bug: it was refused, with the advice to send 0 or more."""
    assert completion(top_k=2**40).sampling.top_k == COUNT_MAX


def test_number_of_choices_is_converted_without_a_check() -> None:
    assert [completion(n=n).n for n in (1, 64, 65, 0)] == [1, 64, 65, 0], "the preprocess layer checks ranges"


@pytest.mark.parametrize(("given", "expected"), [(None, None), (0, 0), (5, 5), (20, 20)])
def test_completion_requests_log_probabilities_by_number(given: int | None, expected: int | None) -> None:
    assert completion(logprobs=given).logprobs == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"top_logprobs": 0}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ],
)
def test_chat_requests_log_probabilities_with_two_fields(fields: dict[str, Any], expected: int | None) -> None:
    assert chat(**fields).logprobs == expected


@pytest.mark.parametrize(
    ("ask", "fields", "param"),
    [
        (chat, {"top_logprobs": 1}, "top_logprobs"),
        (chat, {"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
        (chat, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (chat, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        (chat, {"logprobs": 1}, "logprobs"),
        (completion, {"logprobs": True}, "logprobs"),
        (completion, {"n": True}, "n"),
        (completion, {"n": 1.5}, "n"),
    ],
)
def test_wrong_requests_for_choices_and_log_probabilities_are_refused_by_name(
    ask: Any, fields: dict[str, Any], param: str
) -> None:
    assert refusal(ask, **fields)[0] == param


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("text", {"text": "text"}),
        ("", {"text": ""}),
        (["text"], {"text": "text"}),
        ([1, 2, 3], {"token_ids": (1, 2, 3)}),
        ([7], {"token_ids": (7,)}),
        ([[1, 2]], {"token_ids": (1, 2)}),
    ],
)
def test_prompt_is_a_text_or_token_ids(prompt: Any, expected: dict[str, Any]) -> None:
    request = completion(prompt=prompt)

    assert {name: getattr(request, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("prompt", "field", "values"),
    [(["a", "b"], "text", ["a", "b"]), ([[1], [2, 3]], "token_ids", [(1,), (2, 3)])],
)
def test_each_of_several_prompts_becomes_a_part_with_all_settings(prompt: Any, field: str, values: Any) -> None:
    request = completion(prompt=prompt, n=2, seed=7)

    assert [getattr(part, field) for part in request.parts] == values
    assert {(part.model, part.n, part.sampling.seed) for part in request.parts} == {("m", 2, 7)}
    assert (request.text, request.token_ids, request.n) == (None, None, 2)


@pytest.mark.parametrize("prompt", ["a", [1]])
def test_too_many_prompts_are_refused_before_they_are_converted(prompt: Any) -> None:
    assert len(completion(prompt=[prompt] * ANSWERS_MAX).parts) == ANSWERS_MAX
    assert refusal(completion, prompt=[prompt] * (ANSWERS_MAX + 1))[0] == "prompt"


@pytest.mark.parametrize("logprobs", [0, 1])
def test_echo_with_log_probabilities_is_refused(logprobs: int) -> None:
    assert completion(echo=True).text == "hi"
    assert completion(echo=False, logprobs=logprobs).logprobs == logprobs
    assert refusal(completion, echo=True, logprobs=logprobs)[0] == "echo"


def test_chat_has_no_echo() -> None:
    assert refusal(chat, echo=True)[0] == "echo"


@pytest.mark.parametrize("prompt", [[], ["a", 1], [1, "a"], [1, [2]], [[1], "a"]])
def test_prompts_of_different_kinds_are_refused(prompt: Any) -> None:
    assert refusal(completion, prompt=prompt)[0] == "prompt"


@pytest.mark.parametrize("given", [None, [], [7, 8], [[7, 8]]])
@pytest.mark.parametrize("ask", [completion, chat])
def test_answer_continues_after_the_tokens_that_the_client_has(ask: Any, given: Any) -> None:
    request = ask(generated_token_ids=given)

    assert request.generated_token_ids == ((7, 8) if given else ())
    assert request.generated_choices == ()


def test_each_choice_continues_after_its_own_tokens() -> None:
    request = completion(n=3, generated_token_ids=[[7, 8], None, []])

    assert request.generated_choices == ((7, 8), None, ())


def test_choices_with_the_same_tokens_start_together() -> None:
    request = completion(n=2, generated_token_ids=[[7], [7]])

    assert (request.generated_token_ids, request.generated_choices) == ((7,), ())


def test_tokens_of_several_prompts_are_listed_prompt_by_prompt() -> None:
    request = completion(prompt=["a", "b", "c"], n=2, generated_token_ids=[[1], None, None, None, [2], [2]])

    assert [part.generated_choices for part in request.parts] == [((1,), None), (None, None), ()]
    assert [part.generated_token_ids for part in request.parts] == [(), (), (2,)]


def test_tokens_of_prompts_with_one_answer_each_are_that_answers() -> None:
    request = completion(prompt=["a", "b"], generated_token_ids=[None, [2]])

    assert [list(part.open_choices) for part in request.parts] == [[], [0]]
    assert request.parts[1].generated_token_ids == (2,)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"n": 2, "generated_token_ids": [1, 2]}, "one list for 2 choices"),
        ({"n": 2, "generated_token_ids": [[1]]}, "1 lists for 2 choices"),
        ({"prompt": ["a", "b"], "n": 2, "generated_token_ids": [[1], [2]]}, "2 lists for 4 choices"),
        ({"generated_token_ids": [[1], [2]]}, "2 lists for 1 choices"),
        ({"generated_token_ids": [1, [2]]}, "mixes"),
        ({"generated_token_ids": [1, None]}, "mixes"),
        ({"generated_token_ids": [-1]}, ""),
        ({"generated_token_ids": [2**32]}, ""),
        ({"generated_token_ids": ["a"]}, ""),
        ({"generated_token_ids": "a"}, ""),
    ],
)
def test_tokens_that_do_not_fit_the_choices_are_refused(fields: dict[str, Any], reason: str) -> None:
    param, detail = refusal(completion, **fields)

    assert param is not None
    assert param.startswith("generated_token_ids")
    assert reason in detail


def test_refusals_of_choices_have_the_name_of_the_body_field() -> None:
    body = parse_completion(
        json.dumps({"model": "m", "prompt": "a", "n": 2, "generated_token_ids": [[1], []]}).encode()
    )
    failure = invalid("generated_choices", "generated_choices must have one list for each choice")

    body.name_fields(failure)

    assert failure.param == "generated_token_ids"
    assert failure.detail == "generated_token_ids must have one list for each choice"


def test_text_parts_of_a_message_are_joined() -> None:
    request = chat([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "c")

    assert request.messages == (Message("user", "ab"), Message("user", "c"))


@pytest.mark.parametrize(("given", "name"), [("Ann", "Ann"), (None, "")])
def test_message_may_have_the_name_of_its_speaker(given: str | None, name: str) -> None:
    request = chat(messages=[{"role": "user", "content": "x", "name": given}])

    assert request.messages == (Message("user", "x", name),)


@pytest.mark.parametrize(
    ("content", "param"),
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}], "messages[1].content[0].type"),
        ([{"type": "text", "text": "a"}, {"type": "text"}], "messages[1].content[1].text"),
        ([{"text": "a"}], "messages[1].content[0].type"),
        (None, "messages[1].content"),
        (5, "messages[1].content"),
    ],
)
def test_unsupported_content_is_refused_by_its_path(content: Any, param: str) -> None:
    assert refusal(chat, "fine", content)[0] == param


@pytest.mark.parametrize("ask", [completion, chat])
@pytest.mark.parametrize("field", LIMITS)
def test_each_name_of_the_limit_is_honoured(ask: Any, field: str) -> None:
    """Bug: completions ignored max_completion_tokens."""
    assert ask(**{field: 5}).stop.max_tokens == 5


@pytest.mark.parametrize("ask", [completion, chat])
@pytest.mark.parametrize(("first", "second"), [*itertools.combinations(LIMITS, 2)])
def test_two_names_of_the_limit_must_agree(ask: Any, first: str, second: str) -> None:
    assert ask(**{first: 5, second: 5}).stop.max_tokens == 5
    assert refusal(ask, **{first: 5, second: 6}) == (
        first,
        f"{first} and {second} mean the same: give one of them, or equal values",
    )


@pytest.mark.parametrize("ask", [completion, chat])
@pytest.mark.parametrize("field", LIMITS)
def test_limit_of_minus_one_leaves_the_context_alone(ask: Any, field: str) -> None:
    """llama.cpp's default, and what LM Studio's examples send."""
    assert ask(**{field: -1}).stop == Stop()


@pytest.mark.parametrize("field", LIMITS[1:])
def test_limit_out_of_range_is_refused_by_the_name_that_was_given(field: str) -> None:
    for parse, given in ((parse_completion, {"prompt": "hi"}), (parse_chat, {"messages": []})):
        body = parse(json.dumps({"model": "m", field: 0} | given).encode())

        failure = invalid("max_tokens", "max_tokens is 0")
        body.name_fields(failure)
        assert (failure.param, failure.detail) == (field, f"{field} is 0")


@pytest.mark.parametrize(
    ("given", "seed"),
    [(-1, None), (None, None), (0, 0), (-2, 2**64 - 2), (-(2**63), 2**63), (2**63, 2**63), (2**64 - 1, 2**64 - 1)],
)
def test_seed_below_zero_counts_as_its_bits_and_minus_one_as_none(given: int | None, seed: int | None) -> None:
    """vLLM, llama.cpp and LM Studio take -1 for "another one each time", and OpenAI's seeds are signed."""
    assert completion(seed=given).sampling.seed == seed


@pytest.mark.parametrize("seed", [-(2**63) - 1, 2**64, 10**30, -(10**30)])
def test_seed_that_does_not_fit_into_64_bits_is_refused(seed: int) -> None:
    with pytest.raises(Failure, match="it must fit into 64 bits") as caught:
        check_request(completion(seed=seed))

    assert caught.value.param == "seed"


@pytest.mark.parametrize("options", [None, {}, {"include_usage": None}, {"include_usage": False}])
def test_stream_options_that_ask_for_nothing_need_no_stream(options: Any) -> None:
    assert chat(stream_options=options) == chat()


@pytest.mark.parametrize(
    "fields",
    [{"stop": None}, {"stop": []}, {"logit_bias": {}}, {"logit_bias": None}, {"n": None}, {"user": 5}, {"top_k": -1}],
    ids=str,
)
def test_values_that_change_nothing_are_accepted(fields: dict[str, Any]) -> None:
    assert chat(**fields) == chat()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {"continuous_usage_stats": True}}, "stream_options"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"٣": 1}}, "logit_bias"),
        ({"logit_bias": {"99999999999": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"0" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias"),
        ({"user": 1.5}, "user"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"messages": [{"role": "user", "content": "x", "name": 5}]}, "messages[0].name"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "5"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ],
)
def test_invalid_combinations_and_values_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert refusal(chat, **fields)[0] == param
