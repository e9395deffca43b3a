"""The answer of a request without `stream` is collected choice by choice, in whatever order tokens come."""

import json
from typing import Any

import pytest

from services.core.errors import Reason
from services.core.interface import Delta, TokenLogprobs
from services.core.request import FinishReason
from services.frontend.api.openai.unary import Collector
from tests.http.support import End, Say, Script, events, run, serving


def test_deltas_are_joined_by_choice_and_choices_are_in_order() -> None:
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


def test_token_ids_are_kept_only_with_log_probabilities() -> None:
    collector = Collector()

    collector.deliver(Delta(0, [1, 2], "ab"))
    collector.deliver(Delta(2, [3], "c", logprobs=[TokenLogprobs(-1.0)]))
    collector.deliver(Delta(3, (), "", logprobs=[]))

    assert collector.choices[0].token_ids == [3]
    assert collector.choices[0].logprobs == [TokenLogprobs(-1.0)]


def test_collector_is_empty_before_the_first_delta() -> None:
    assert not Collector().choices


REQUEST: dict[str, Any] = {"model": "org/tiny", "prompt": "Say \u2028 ", "echo": True}
PATH = "/v1/completions"
STEPS = (Say("a"), Say("x", choice=1), Say("b"), End(), End(1))


def texts_of(body: bytes, index: int) -> list[str]:
    *chunks, done = events(body)
    assert done == "[DONE]"
    return [choice["text"] for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]


@pytest.mark.parametrize(
    ("prompt", "text"), [("Say ", "Say "), (list("é€".encode()), "é€"), ([0xC3], "\N{REPLACEMENT CHARACTER}")]
)
def test_echo_precedes_a_whole_answer(prompt: Any, text: str) -> None:
    async def test() -> None:
        async with serving(Script("ok")) as server:
            _, body = await server.post(PATH, REQUEST | {"prompt": prompt})

        answer = json.loads(body)
        assert answer["choices"][0]["text"] == text + "ok"
        assert answer["usage"]["completion_tokens"] == 1

    run(test)


def test_echo_precedes_each_choice_of_a_stream_once() -> None:
    async def test() -> None:
        async with serving(Script(*STEPS)) as server:
            _, body = await server.post(PATH, REQUEST | {"n": 2, "stream": True})

        assert texts_of(body, 0) == ["Say \u2028 ", "a", "b", ""]
        assert texts_of(body, 1) == ["Say \u2028 ", "x", ""]
        assert "\u2028".encode() not in body

    run(test)


def test_echo_precedes_an_empty_answer() -> None:
    async def test() -> None:
        async with serving(Script(End())) as server:
            _, body = await server.post(PATH, REQUEST | {"stream": True})

        assert texts_of(body, 0) == ["Say \u2028 ", ""]

    run(test)


def test_failure_before_the_answer_has_its_status_and_no_echo() -> None:
    async def test() -> None:
        async with serving(Script(Reason.OVERLOADED)) as server:
            response, body = await server.post(PATH, REQUEST | {"stream": True})

        assert response.status == 503
        assert b"Say" not in body

    run(test)


def test_answer_has_no_echo_unless_the_client_asked() -> None:
    async def test() -> None:
        async with serving(Script("ok")) as server:
            _, body = await server.post(PATH, REQUEST | {"echo": False})

        assert json.loads(body)["choices"][0]["text"] == "ok"

    run(test)
