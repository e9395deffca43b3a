"""Echo: each answer begins with its own prompt, as the client wrote it; nothing else changes."""

import json
from typing import Any

import pytest

from services.errors import Reason
from services.frontend.http.echo import Echo
from services.request import Request
from services.tokenizers.byte_level import ByteTokenizer
from tests.frontend.http.support import End, Say, Script, events, run, serving

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
