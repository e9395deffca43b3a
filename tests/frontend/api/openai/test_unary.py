"""A unary answer is gathered choice by choice, however the choices' tokens come mixed."""

import json
from typing import Any

import pytest

from services.core.errors import Reason
from services.core.interface import Delta, TokenLogprobs
from services.core.request import FinishReason, Request
from services.frontend.api.openai.unary import Collector, Echo
from services.models.tokenizers.byte_level import ByteTokenizer
from tests.http.support import End, Say, Script, events, run, serving


def test_choices_are_put_together_and_stand_in_order() -> None:
    collector = Collector()

    for delta in (
        Delta(0, [1], "b", choice=1),
        Delta(0, [2], "a", choice=0),
        Delta(1, (), "B", choice=1, finish_reason=FinishReason.LENGTH),
        Delta(1, (), "A", choice=0, finish_reason=FinishReason.STOP),
    ):
        collector.deliver(delta)

    assert [(index, one.text, one.finish_reason) for index, one in collector.choices.items()] == [
        (0, "aA", FinishReason.STOP),
        (1, "bB", FinishReason.LENGTH),
    ]


def test_only_tokens_with_log_probabilities_are_kept() -> None:
    collector = Collector()

    collector.deliver(Delta(0, [1, 2], "ab"))
    collector.deliver(Delta(2, [3], "c", logprobs=[TokenLogprobs(-1.0)]))
    collector.deliver(Delta(3, (), "", logprobs=[]))

    assert collector.choices[0].token_ids == [3]
    assert collector.choices[0].logprobs == [TokenLogprobs(-1.0)]


def test_nothing_has_come_until_something_does() -> None:
    assert not Collector().choices


ASKED: dict[str, Any] = {"model": "org/tiny", "prompt": "Say \u2028 ", "echo": True}
PATH = "/v1/completions"
STEPS = (Say("a"), Say("x", choice=1), Say("b"), End(), End(1))


def texts_of(body: bytes, index: int) -> list[str]:
    *told, done = events(body)
    assert done == "[DONE]"
    return [choice["text"] for event in told for choice in event["choices"] if choice["index"] == index]


@pytest.mark.parametrize(
    ("prompt", "text"), [("Say ", "Say "), (list("é€".encode()), "é€"), ([0xC3], "\N{REPLACEMENT CHARACTER}")]
)
def test_a_prompt_is_shown_as_it_was_written_or_as_its_tokens_read(prompt: Any, text: str) -> None:
    async def test() -> None:
        async with serving(Script("ok")) as server:
            _, body = await server.post(PATH, ASKED | {"prompt": prompt})

        answer = json.loads(body)
        assert answer["choices"][0]["text"] == text + "ok"
        assert answer["usage"]["completion_tokens"] == 1

    run(test)


def test_in_a_stream_it_comes_once_before_each_choice() -> None:
    async def test() -> None:
        async with serving(Script(*STEPS)) as server:
            _, body = await server.post(PATH, ASKED | {"n": 2, "stream": True})

        assert texts_of(body, 0) == ["Say \u2028 ", "a", "b", ""]
        assert texts_of(body, 1) == ["Say \u2028 ", "x", ""]
        assert "\u2028".encode() not in body

    run(test)


def test_it_comes_before_an_empty_answer_too() -> None:
    async def test() -> None:
        async with serving(Script(End())) as server:
            _, body = await server.post(PATH, ASKED | {"stream": True})

        assert texts_of(body, 0) == ["Say \u2028 ", ""]

    run(test)


def test_a_failure_before_the_answer_has_its_status_and_no_echo() -> None:
    async def test() -> None:
        async with serving(Script(Reason.OVERLOADED)) as server:
            response, body = await server.post(PATH, ASKED | {"stream": True})

        assert response.status == 503
        assert b"Say" not in body

    run(test)


def test_not_asked_for_it_is_not_there() -> None:
    async def test() -> None:
        async with serving(Script("ok")) as server:
            _, body = await server.post(PATH, ASKED | {"echo": False})

        assert json.loads(body)["choices"][0]["text"] == "ok"

    run(test)


def test_each_choice_has_the_prompt_that_it_answers() -> None:
    parts = (Request(model="m", text="one", n=2), Request(model="m", token_ids=tuple(b"two"), n=2))
    echo = Echo(Request(model="m", n=2, parts=parts), lambda: ByteTokenizer.token_bytes)

    assert [echo.text_of(index) for index in range(4)] == ["one", "one", "two", "two"]
