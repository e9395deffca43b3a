"""return_token_ids: each id is told once and in order, in the places that vLLM has for them, streamed and whole."""

import json
from itertools import chain
from typing import Any

import pytest

from services.core.call import Told
from services.core.errors import Reason
from services.core.interface import Delta, TokenLogprobs
from services.core.request import Continuation, FinishReason, Request, Stop
from services.frontend.api.openai.responses import Answer, Brought, ChatAnswer, CompletionAnswer
from services.frontend.api.openai.sse.events import DetailedEvents, events_of
from services.models.tokenizers.byte_level import ByteTokenizer
from tests.http.support import PROMPT, End, Say, Script, error_of, events, serving
from tests.support.doubles import run_async

COMPLETIONS = ("/v1/completions", {"model": "org/tiny", "prompt": "hi"})
CHATS = ("/v1/chat/completions", {"model": "org/tiny", "messages": [{"role": "user", "content": "hi"}]})
ENDPOINTS = pytest.mark.parametrize(("path", "body"), [COMPLETIONS, CHATS], ids=["completions", "chats"])
ASKED = {"return_token_ids": True}
HELD = (
    Say("He", tokens=b"He"),
    Say("", tokens=b"l"),
    Say("", tokens=b"\xf0\x9f"),
    Say("l", tokens=b"x"),
    End(text="!"),
)
"""Steps of an answer of which two deltas show no text."""
IDS = [*b"Hel", 0xF0, 0x9F, *b"x"]


def streamed(path: str, body: dict[str, Any], *steps: Any) -> list[dict[str, Any]]:
    async def test() -> list[dict[str, Any]]:
        async with serving(Script(*steps)) as server:
            _, answer = await server.post(path, body | {"stream": True})
        return [event for event in events(answer) if event != "[DONE]"]

    return run_async(test())


def whole(path: str, body: dict[str, Any], *steps: Any, **headers: str) -> tuple[int, bytes]:
    async def test() -> tuple[int, bytes]:
        async with serving(Script(*steps)) as server:
            response, answer = await server.post(path, body, headers=headers)
        return response.status, answer

    return run_async(test())


def told_ids(chunks: list[dict[str, Any]], index: int = 0) -> list[int]:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return list(chain.from_iterable(choice["token_ids"] for choice in choices))


@ENDPOINTS
def test_events_have_each_id_once_also_of_text_that_is_held_back(path: str, body: dict[str, Any]) -> None:
    chunks = streamed(path, body | ASKED, *HELD)

    assert told_ids(chunks) == IDS
    assert sum(bool(chunk["choices"][0]["token_ids"]) for chunk in chunks) == 4


@ENDPOINTS
def test_whole_answer_has_the_ids_of_each_choice(path: str, body: dict[str, Any]) -> None:
    _, answer = whole(path, body | ASKED | {"n": 2}, Say("a", tokens=b"a"), Say("b", 1, b"bc"), Say("", tokens=b"d"))

    assert [choice["token_ids"] for choice in json.loads(answer)["choices"]] == [[*b"ad"], [*b"bc"]]


@pytest.mark.parametrize("steps", [HELD, ()], ids=["text", "no text"])
def test_prompt_of_a_completion_is_in_the_first_event_of_each_choice(steps: tuple[Any, ...]) -> None:
    path, body = COMPLETIONS
    chunks = streamed(path, body | ASKED | {"n": 2}, *steps)

    for index in range(2):
        first, *others = [one for chunk in chunks for one in chunk["choices"] if one["index"] == index]
        assert first["prompt_token_ids"] == list(PROMPT)
        assert all("prompt_token_ids" not in one for one in others)


def test_prompt_of_a_chat_is_beside_the_choice_of_its_first_event() -> None:
    path, body = CHATS
    first, *others = streamed(path, body | ASKED, *HELD)

    assert first["prompt_token_ids"] == list(PROMPT)
    assert all("prompt_token_ids" not in chunk for chunk in others)


def test_whole_answers_have_the_prompt_where_vllm_has_it() -> None:
    completion = json.loads(whole(*COMPLETIONS[:1], COMPLETIONS[1] | ASKED, "a")[1])
    chat = json.loads(whole(*CHATS[:1], CHATS[1] | ASKED, "a")[1])

    assert completion["choices"][0]["prompt_token_ids"] == list(PROMPT)
    assert "prompt_token_ids" not in completion
    assert chat["prompt_token_ids"] == list(PROMPT)


@ENDPOINTS
@pytest.mark.parametrize("asked", [{}, {"return_token_ids": False}, {"return_token_ids": None}])
def test_nothing_is_told_unless_the_client_asks(path: str, body: dict[str, Any], asked: dict[str, Any]) -> None:
    chunks = streamed(path, body | asked, *HELD)

    assert "token_ids" not in json.dumps(chunks)
    assert "token_ids" not in whole(path, body | asked, "a")[1].decode()


@ENDPOINTS
def test_partial_answer_of_a_failure_has_its_ids(path: str, body: dict[str, Any]) -> None:
    steps = (Say("a", tokens=b"a"), Say("", tokens=b"\xf0"), Reason.ENGINE_ERROR)
    status, answer = whole(path, body | ASKED, *steps, **{"X-Return-Partial": "true"})

    assert status == 500
    assert error_of(answer, has_partial=True)["partial"]["choices"][0]["token_ids"] == [*b"a", 0xF0]


@ENDPOINTS
def test_ids_come_with_log_probabilities_and_usage(path: str, body: dict[str, Any]) -> None:
    said = [Say("a", tokens=b"a", logprob=-1.0), Say("", tokens=b"\xf0", logprob=-1.0), End(text="!")]
    asked = {"logprobs": True if "chat" in path else 1, "stream_options": {"continuous_usage_stats": True}}

    chunks = streamed(path, body | ASKED | asked, *said)

    assert told_ids(chunks) == [*b"a", 0xF0]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == ([0] if "chat" in path else []) + [1, 2, 2, 2]


def test_deltas_that_were_joined_for_a_slow_client_tell_each_id_once() -> None:
    told = Told()
    told.prompts = [PROMPT]
    answer = ChatAnswer(request_id="r", model="m", returns_token_ids=True, told=told)
    written = events_of(answer, ByteTokenizer, is_chunked=False)

    joined = written.of(Delta(0, [1, 2, 3], "", finish_reason=FinishReason.LENGTH))

    assert told_ids([event for event in events(joined) if event != "[DONE]"]) == [1, 2, 3]


@pytest.mark.parametrize("kind", [CompletionAnswer, ChatAnswer])
def test_only_clients_that_ask_pay(kind: type[Answer]) -> None:
    plain = events_of(kind(request_id="r", model="m"), ByteTokenizer, is_chunked=False)
    asked = events_of(kind(request_id="r", model="m", returns_token_ids=True), ByteTokenizer, is_chunked=False)

    assert not isinstance(plain, DetailedEvents)
    assert isinstance(asked, DetailedEvents)


# Answers that continue after tokens of the client


def brought(token_ids: tuple[int, ...], **stop: Any) -> Brought:
    return Brought(Request(model="m", text="hi", generated_token_ids=token_ids, stop=Stop(**stop)))


@pytest.mark.parametrize("strings", [(), ("l\u00e9",)])
@pytest.mark.parametrize("cut", range(8))
def test_offsets_of_a_continued_completion_are_those_of_the_whole_one(cut: int, strings: tuple[str, ...]) -> None:
    tokens = tuple("Helé\u00e9x".encode())
    shown = brought(tokens, strings=strings).text_of(0, ByteTokenizer())

    def offsets_of(known: tuple[int, ...]) -> list[int]:
        answer = CompletionAnswer(request_id="r", model="m", brought=brought(known, strings=strings))
        writer: Any = answer.logprobs_writer(0, ByteTokenizer())
        text = shown[len(brought(known, strings=strings).text_of(0, ByteTokenizer())) :]
        rest = tokens[len(known) :]
        return list(writer.write(rest, [TokenLogprobs(-1.0)] * len(rest), text, is_last=True).text_offset)

    assert offsets_of(tokens[:cut]) == offsets_of(())[cut:]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_echo_is_left_out_for_a_choice_of_which_the_client_has_tokens(is_streamed: bool) -> None:
    path, body = COMPLETIONS
    asked = body | {"echo": True, "n": 2, "generated_token_ids": [[1], []]}
    steps = ("a", Say("b", 1))

    if is_streamed:
        chunks = streamed(path, asked, *steps)
        texts = ["".join(one["text"] for c in chunks for one in c["choices"] if one["index"] == i) for i in range(2)]
    else:
        texts = [choice["text"] for choice in json.loads(whole(path, asked, *steps)[1])["choices"]]

    assert texts == ["a", "hib"]


def test_usage_so_far_of_a_continued_chat_begins_with_the_tokens_of_the_client() -> None:
    answer = ChatAnswer(request_id="r", model="m", has_usage_in_events=True, brought=brought((1, 2, 3)))
    written = events_of(answer, ByteTokenizer, is_chunked=False).of(Delta(3, [97], "a", prompt_tokens=2))

    assert [event["usage"]["completion_tokens"] for event in events(written)] == [3, 4]


# How an answer continued after a move


@pytest.mark.parametrize("kind", [CompletionAnswer, ChatAnswer])
def test_last_event_of_a_choice_says_how_it_continued(kind: type[Answer]) -> None:
    written = events_of(kind(request_id="r", model="m"), ByteTokenizer, is_chunked=False)

    parts = (
        written.of(Delta(0, [97], "a")),
        written.of(Delta(1, (), "b", finish_reason=FinishReason.STOP, continuation=Continuation.PREFIX)),
    )

    *others, last = [choice for part in parts for event in events(part) for choice in event["choices"]]
    assert last["continuation"] == "prefix"
    assert all("continuation" not in one for one in others)
