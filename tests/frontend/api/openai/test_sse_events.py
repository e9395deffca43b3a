"""Events: each choice opens once, goes on token by token and ends once, whatever comes between."""

import json
from typing import Any

import pytest

from services.core.interface import Delta, TokenLogprobs
from services.core.request import FinishReason
from services.frontend.api.openai.responses import ChatAnswer, CompletionAnswer
from services.frontend.api.openai.sse_events import Events
from services.models.tokenizers.byte_level import ByteTokenizer


def chat_events(*, is_chunked: bool = False) -> Events:
    return Events(ChatAnswer(request_id="r", model="m"), lambda: ByteTokenizer.token_bytes, is_chunked=is_chunked)


def choices(events: bytes) -> list[dict[str, Any]]:
    blocks = [block.removeprefix(b"data: ") for block in events.split(b"\n\n") if block]
    return [choice for block in blocks for choice in json.loads(block)["choices"]]


def deltas(events: bytes) -> list[tuple[int, Any]]:
    return [(choice["index"], choice["delta"]) for choice in choices(events)]


ROLE = {"role": "assistant", "content": ""}


def test_a_choice_opens_with_its_first_event_and_only_then() -> None:
    events = chat_events()

    assert deltas(events.of(Delta(0, [1], "a", choice=1))) == [(1, ROLE), (1, {"content": "a"})]
    assert deltas(events.of(Delta(0, [1], "b", choice=0))) == [(0, ROLE), (0, {"content": "b"})]
    assert deltas(events.of(Delta(1, [1], "c", choice=1))) == [(1, {"content": "c"})]


def test_what_shows_nothing_makes_no_event_and_opens_nothing() -> None:
    events = chat_events()

    assert events.of(Delta(0, [1], "")) == b""
    assert events.of(Delta(1, (), "", logprobs=[])) == b""
    assert deltas(events.of(Delta(1, [1], "a"))) == [(0, ROLE), (0, {"content": "a"})]
    assert events.of(Delta(2, [1], "")) == b""


def test_an_end_is_an_event_after_the_text_that_was_held_back() -> None:
    events = chat_events()
    events.of(Delta(0, [1], "a"))

    last = choices(events.of(Delta(1, (), "held", finish_reason=FinishReason.LENGTH)))

    assert [(choice["delta"], choice["finish_reason"]) for choice in last] == [
        ({"content": "held"}, None),
        ({}, "length"),
    ]


def test_a_choice_without_any_text_opens_and_ends() -> None:
    assert deltas(chat_events().of(Delta(0, (), "", finish_reason=FinishReason.STOP))) == [(0, ROLE), (0, {})]


def test_tokens_whose_text_is_held_back_are_sent_for_their_log_probabilities() -> None:
    events = chat_events()

    [_, sent] = choices(events.of(Delta(0, [97], "", choice=1, logprobs=[TokenLogprobs(-1.0)])))

    assert (sent["index"], sent["delta"]) == (1, {"content": ""})
    assert sent["logprobs"]["content"][0]["token"] == "a"


def test_each_choice_counts_its_own_characters() -> None:
    events = Events(CompletionAnswer(request_id="r", model="m"), lambda: ByteTokenizer.token_bytes, is_chunked=False)

    def offsets(text: str, choice: int) -> Any:
        tokens = list(text.encode())
        sent = events.of(Delta(0, tokens, text, choice, [TokenLogprobs(-1.0)] * len(tokens)))
        return choices(sent)[0]["logprobs"]["text_offset"]

    assert [offsets("ab", 0), offsets("c", 1), offsets("d", 0), offsets("e", 1)] == [[0, 1], [0], [2], [1]]


def test_the_vocabulary_is_not_asked_for_without_need() -> None:
    def never() -> list[bytes]:
        raise AssertionError

    events = Events(ChatAnswer(request_id="r", model="m"), never, is_chunked=False)

    assert events.of(Delta(0, [1], "a"))
    assert events.of(Delta(1, (), "", finish_reason=FinishReason.STOP))


@pytest.mark.parametrize("text", ["a", "é", "\u2028" * 3])
def test_chunked_the_bytes_are_one_chunk_of_the_very_same_events(text: str) -> None:
    plain, chunked = chat_events(), chat_events(is_chunked=True)
    created = json.dumps(choices(plain.of(Delta(0, [1], text))))  # The first event opens the choice.
    assert created == json.dumps(choices(_content(chunked.of(Delta(0, [1], text)))))

    for delta in (
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


def test_no_token_can_break_its_line() -> None:
    odd = "\u2028\u2029\u0085\n"
    events = Events(CompletionAnswer(request_id="r", model="m"), lambda: [odd.encode()], is_chunked=False)

    sent = events.of(Delta(0, [0], odd, logprobs=[TokenLogprobs(-1.0)]))

    assert len(sent.decode().splitlines()) == 2
    assert choices(sent)[0]["logprobs"]["tokens"] == [odd]
