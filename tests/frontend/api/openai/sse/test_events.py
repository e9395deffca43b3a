"""Events are one line of JSON each, exactly as schemas.py has them; a choice opens once and ends once."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import pytest

from services.core.interface import Delta, TokenLogprobs, Usage
from services.core.request import FinishReason, Request
from services.frontend.api.openai.responses import Answer, ChatAnswer, CompletionAnswer, Echo
from services.frontend.api.openai.schemas import ChatCompletionChunk, Completion
from services.frontend.api.openai.sse.events import DONE, Events, json_text
from services.models.tokenizers.byte_level import ByteTokenizer

USAGE = Usage(prompt_tokens=3, completion_tokens=4)
ROLE = {"role": "assistant", "content": ""}
SHAPES: dict[type[Answer], type[msgspec.Struct]] = {CompletionAnswer: Completion, ChatAnswer: ChatCompletionChunk}


def chat_events(*, is_chunked: bool = False) -> Events:
    return Events(ChatAnswer(request_id="r", model="m"), ByteTokenizer, is_chunked=is_chunked)


def payloads(events: bytes) -> list[bytes]:
    return [block.removeprefix(b"data: ") for block in events.split(b"\n\n") if block]


def choices(events: bytes) -> list[dict[str, Any]]:
    return [choice for payload in payloads(events) for choice in json.loads(payload)["choices"]]


def deltas(events: bytes) -> list[tuple[int, Any]]:
    return [(choice["index"], choice["delta"]) for choice in choices(events)]


@pytest.mark.parametrize("text", ["", "plain", '"\\\n\r\t', "\x00\x1c\x7f", "é😀", "\u0085\u2028\u2029", "\U0010ffff"])
def test_text_survives_as_one_line_of_json(text: str) -> None:
    encoded = json_text(text)

    assert json.loads(encoded) == text
    assert len(encoded.decode().splitlines()) == 1


def whole_stream(kind: type[Answer], model: str, *, includes_usage: bool, echo: Echo | None) -> Iterator[bytes]:
    """The payload of each event of a stream in which every way of making an event occurs."""
    answer = kind(request_id="r", model=model, includes_usage=includes_usage, echo=echo, created=5)
    events = Events(answer, ByteTokenizer, is_chunked=False)
    logprobs = [TokenLogprobs(-0.5, ((97, -0.5), (0xE2, -2.0)))]
    for delta in (
        Delta(0, [97], "a"),
        Delta(1, [98], 'b"\n'),
        Delta(2, [99], "é\u2028"),
        Delta(3, [97], "a", logprobs=logprobs),
        Delta(4, [0xE2], "", logprobs=logprobs),
        Delta(0, [100], "d", choice=1, logprobs=logprobs),
        Delta(5, (), "held", finish_reason=FinishReason.LENGTH),
        Delta(1, (), "", choice=1, finish_reason=FinishReason.STOP),
    ):
        yield from payloads(events.of(delta))
    *last, done = payloads(events.ending(USAGE))
    assert done == b"[DONE]"
    yield from last


ECHO = Echo(Request(model="m", text="Say \u2028", n=2), ByteTokenizer)


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("model", ["m", "\0", '"\\u0000"', "\n\n", "[]", "\u2028é"])
@pytest.mark.parametrize("includes_usage", [False, True])
@pytest.mark.parametrize("echo", [None, ECHO])
def test_every_event_is_the_encoding_of_its_schema(
    kind: type[Answer], model: str, includes_usage: bool, echo: Echo | None
) -> None:
    """Most events are put together from bytes for speed: each must be what its struct would be encoded as."""
    for payload in whole_stream(kind, model, includes_usage=includes_usage, echo=echo):
        event: Any = msgspec.json.decode(payload, type=SHAPES[kind])

        assert msgspec.to_builtins(event) == json.loads(payload)
        assert list(msgspec.to_builtins(event)) == list(json.loads(payload))
        assert event.model == model
        assert len(payload.decode().splitlines()) == 1


def test_first_event_of_a_choice_follows_its_opening() -> None:
    events = chat_events()

    assert deltas(events.of(Delta(0, [1], "a", choice=1))) == [(1, ROLE), (1, {"content": "a"})]
    assert deltas(events.of(Delta(0, [1], "b", choice=0))) == [(0, ROLE), (0, {"content": "b"})]
    assert deltas(events.of(Delta(1, [1], "c", choice=1))) == [(1, {"content": "c"})]


def test_delta_that_shows_nothing_makes_no_event_and_no_opening() -> None:
    events = chat_events()

    assert events.of(Delta(0, [1], "")) == b""
    assert events.of(Delta(1, (), "", logprobs=[])) == b""
    assert deltas(events.of(Delta(1, [1], "a"))) == [(0, ROLE), (0, {"content": "a"})]
    assert events.of(Delta(2, [1], "")) == b""


def test_finish_event_follows_the_text_that_was_held_back() -> None:
    events = chat_events()
    events.of(Delta(0, [1], "a"))

    last = choices(events.of(Delta(1, (), "held", finish_reason=FinishReason.LENGTH)))

    assert [(choice["delta"], choice["finish_reason"]) for choice in last] == [
        ({"content": "held"}, None),
        ({}, "length"),
    ]


def test_choice_without_text_opens_and_ends() -> None:
    assert deltas(chat_events().of(Delta(0, (), "", finish_reason=FinishReason.STOP))) == [(0, ROLE), (0, {})]


@pytest.mark.parametrize("kind", SHAPES)
def test_stream_ends_with_usage_if_the_client_asked_and_with_done(kind: type[Answer]) -> None:
    def ending(*, includes_usage: bool) -> bytes:
        answer = kind(request_id="r", model="m", includes_usage=includes_usage)
        return Events(answer, ByteTokenizer, is_chunked=False).ending(USAGE)

    assert ending(includes_usage=False) == DONE == b"data: [DONE]\n\n"
    usage, done = payloads(ending(includes_usage=True))
    assert json.loads(usage)["choices"] == []
    assert json.loads(usage)["usage"]["total_tokens"] == 7
    assert done == b"[DONE]"


def test_token_without_text_is_sent_for_its_log_probabilities() -> None:
    events = chat_events()

    [_, sent] = choices(events.of(Delta(0, [97], "", choice=1, logprobs=[TokenLogprobs(-1.0)])))

    assert (sent["index"], sent["delta"]) == (1, {"content": ""})
    assert sent["logprobs"]["content"][0]["token"] == "a"


def test_text_offsets_are_counted_for_each_choice_separately() -> None:
    events = Events(CompletionAnswer(request_id="r", model="m"), ByteTokenizer, is_chunked=False)

    def offsets(text: str, choice: int) -> Any:
        tokens = list(text.encode())
        sent = events.of(Delta(0, tokens, text, choice, [TokenLogprobs(-1.0)] * len(tokens)))
        return choices(sent)[0]["logprobs"]["text_offset"]

    assert [offsets("ab", 0), offsets("c", 1), offsets("d", 0), offsets("e", 1)] == [[0, 1], [0], [2], [1]]


@pytest.mark.parametrize("is_chunked", [False, True])
def test_log_probabilities_of_text_that_is_held_back_come_with_that_text_or_at_the_end(is_chunked: bool) -> None:
    """An empty event would be a chunk of length 0, which ends the body."""
    events = Events(CompletionAnswer(request_id="r", model="m"), ByteTokenizer, is_chunked=is_chunked)

    def sent(position: int, token_ids: bytes, text: str, finish_reason: FinishReason | None = None) -> list[Any]:
        logprobs = [TokenLogprobs(-1.0)] * len(token_ids) if token_ids else None
        raw = events.of(Delta(position, list(token_ids), text, 0, logprobs, finish_reason))
        return [
            (one["text"], one["logprobs"] and one["logprobs"]["text_offset"], one["finish_reason"])
            for one in choices(_content(raw) if is_chunked and raw else raw)
        ]

    assert sent(0, b"a", "a") == [("a", [0], None)]
    assert sent(1, b"st", "") == [("", [1], None)]
    assert sent(3, b"o", "") == []
    assert sent(4, b"!", "sto!") == [("sto!", [2, 3, 4], None)]
    assert sent(5, b"sto", "") == [("", [5], None)]
    assert sent(8, b"p", "") == []
    assert sent(9, b"", "", FinishReason.STOP) == [("", [5, 5, 5], None), ("", None, "stop")]


def test_vocabulary_is_not_loaded_without_log_probabilities() -> None:
    def never() -> ByteTokenizer:
        raise AssertionError

    events = Events(ChatAnswer(request_id="r", model="m"), never, is_chunked=False)

    assert events.of(Delta(0, [1], "a"))
    assert events.of(Delta(1, (), "", finish_reason=FinishReason.STOP))


@pytest.mark.parametrize("text", ["a", "é", "\u2028" * 3])
def test_chunk_holds_the_same_events_as_without_chunks(text: str) -> None:
    plain, chunked = chat_events(), chat_events(is_chunked=True)

    for delta in (
        Delta(0, [1], text),
        Delta(1, [1], text),
        Delta(2, [97], text, logprobs=[TokenLogprobs(-1.0)]),
        Delta(3, (), text, finish_reason=FinishReason.STOP),
    ):
        assert choices(_content(chunked.of(delta))) == choices(plain.of(delta))


def _content(chunk: bytes) -> bytes:
    size, _, rest = chunk.partition(b"\r\n")
    assert rest.endswith(b"\r\n")
    assert len(rest) == int(size, 16) + 2
    return rest[:-2]


def test_log_probabilities_of_a_token_with_line_separators_stay_on_one_line() -> None:
    odd = "\u2028\u2029\u0085\n"

    class Separators:
        token_bytes = (odd.encode(),)
        special_tokens: Mapping[int, str] = {}

    events = Events(CompletionAnswer(request_id="r", model="m"), Separators, is_chunked=False)

    sent = events.of(Delta(0, [0], odd, logprobs=[TokenLogprobs(-1.0)]))

    assert len(sent.decode().splitlines()) == 2
    assert choices(sent)[0]["logprobs"]["tokens"] == [odd]


def dispatched(stream: bytes) -> list[tuple[str, str | None]]:
    """Data and id of each event, as openai-python 1 to 3 decodes a stream: an id is never forgotten."""
    found, data, last_id = [], [], None
    for line in stream.decode().splitlines():
        name, _, value = line.partition(": ")
        if name == "data":
            data.append(value)
        elif name == "id":
            last_id = value
        elif not line and (data or last_id is not None):
            found.append(("\n".join(data), last_id))
            data = []
    return found


class EventsWithIds(Events):
    has_ids = True


@pytest.mark.parametrize(("kind", "id_line", "seen_id"), [(Events, b"", None), (EventsWithIds, b"id: 1\n", "1")])
def test_stock_sdk_sees_no_event_in_a_comment(kind: type[Events], id_line: bytes, seen_id: str | None) -> None:
    comment = kind(ChatAnswer(request_id="r", model="m"), ByteTokenizer, is_chunked=False).comment()
    event = id_line + b"data: x\n\n"

    found = dispatched(comment + event + comment + comment + event + comment + DONE)

    assert found == [("x", seen_id), ("x", seen_id), ("[DONE]", seen_id)]


def test_comment_is_a_block_of_its_own_for_clients_that_split_at_empty_lines() -> None:
    """vLLM's bench skips a block that begins with a colon."""
    assert chat_events().comment() == b": keepalive\n\n"


def test_comment_is_a_chunk_where_events_are() -> None:
    assert chat_events(is_chunked=True).comment() == b"d\r\n: keepalive\n\n\r\n"
