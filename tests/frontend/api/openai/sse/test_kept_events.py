"""An id says exactly what its client has: what it got and what it gets by a resume from there are the whole answer."""

import json
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from services.core.call import Told
from services.core.errors import Failure, Reason
from services.core.flow.delta_buffer import DeltaBuffer
from services.core.generation.cursor import Cursor, parse_cursor
from services.core.interface import Delta, TokenLogprobs, Usage
from services.core.request import Continuation, FinishReason, Request, Stop
from services.frontend.api.openai.responses import Answer, Brought, ChatAnswer, CompletionAnswer, Echo
from services.frontend.api.openai.sse.events import DONE, SIZES_PREPARED, Events
from services.frontend.api.openai.sse.kept_events import (
    NUMBERS_PREPARED,
    KeptEvents,
    ResumedEvents,
    kept_events,
)
from services.frontend.layers.detokenize import Cut, Detokenizer
from services.models.tokenizers.byte_level import EOS, ByteTokenizer

KINDS: tuple[type[Answer], ...] = (CompletionAnswer, ChatAnswer)
STOPPED, CUT_OFF = FinishReason.STOP, FinishReason.LENGTH


@dataclass
class Event:
    """One event as a client has it."""

    id: str | None
    data: str

    @property
    def choices(self) -> list[dict[str, Any]]:
        return list(json.loads(self.data)["choices"])

    @property
    def only(self) -> dict[str, Any]:
        (choice,) = self.choices
        return choice


def events_in(stream: bytes) -> list[Event]:
    """The events, each of which has data, and an id of its own or none."""
    found = []
    for block in stream.decode().split("\n\n")[:-1]:
        fields = [line.split(": ", 1) for line in block.split("\n")]
        names = [name for name, _ in fields]
        assert names in (["data"], ["id", "data"], ["retry", "id", "data"]), block
        named = dict(fields)
        found.append(Event(named.get("id"), named["data"]))
    return found


def checksum(token_ids: Sequence[int]) -> int:
    return zlib.crc32(array("I", list(token_ids)).tobytes())


def kept(kind: type[Answer] = CompletionAnswer, count: int = 1, **fields: Any) -> KeptEvents:
    return KeptEvents(kind(request_id="r", model="m", **fields), ByteTokenizer, count, is_chunked=False)


def raise_it(failure: Failure) -> None:
    raise failure


def logprobs_of(token_ids: Sequence[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs(-token / 300, ((token, -token / 300), (1, -5.0))) for token in token_ids]


# One event for each delta


def test_each_delta_is_one_event_with_the_cursor_after_it() -> None:
    events = kept()

    sent = [events_in(events.of(Delta(at, [token], chr(token)))) for at, token in enumerate(b"abc")]

    assert [[one.only["text"] for one in found] for found in sent] == [["a"], ["b"], ["c"]]
    assert [found[0].id for found in sent] == [f"{n}-{checksum(b'abc'[:n]):08x}" for n in (1, 2, 3)]


@pytest.mark.parametrize("position", [9, NUMBERS_PREPARED - 1, NUMBERS_PREPARED])
@pytest.mark.parametrize("kind", [KeptEvents, Events])
def test_chunk_has_the_size_of_its_event_whatever_size_and_position(kind: type[Events], position: int) -> None:
    answer = CompletionAnswer(request_id="r", model="m")
    more = (1,) if kind is KeptEvents else ()
    plain, chunked = (kind(answer, ByteTokenizer, *more, is_chunked=is_chunked) for is_chunked in (False, True))
    for events in (plain, chunked):
        events.of(Delta(position - 2, [97], "a"))

    for size in (1, *range(SIZES_PREPARED - 300, SIZES_PREPARED + 1)):
        delta = Delta(position - 1, [97], size * "a")
        event = plain.of(delta)
        assert chunked.of(delta) == b"%x\r\n%b\r\n" % (len(event), event)


def test_only_the_first_event_has_the_time_after_which_a_browser_comes_back() -> None:
    events = kept(count=2)

    sent = [events.of(Delta(0, [97], "a", choice=choice)) for choice in (0, 1)]

    assert sent[0].startswith(b"retry: 1000\nid: ")
    assert sent[1].startswith(b"id: ")


def test_opening_text_that_was_held_back_and_finish_are_one_event() -> None:
    events = kept(ChatAnswer)

    [event] = events_in(events.of(Delta(0, (), "held", finish_reason=CUT_OFF)))

    assert event.only["delta"] == {"role": "assistant", "content": "held"}
    assert event.only["finish_reason"] == "length"
    assert event.id == "0e-00000000"


def test_role_is_told_once() -> None:
    events = kept(ChatAnswer)

    sent = [events_in(events.of(Delta(at, [97], "a")))[0].only["delta"] for at in range(2)]

    assert sent == [{"role": "assistant", "content": "a"}, {"content": "a"}]


def test_echoed_prompt_is_part_of_the_first_event() -> None:
    events = kept(echo=Echo(Request(model="m", text="Say "), ByteTokenizer))

    sent = [events_in(events.of(Delta(at, [97], "a")))[0].only["text"] for at in range(2)]

    assert sent == ["Say a", "a"]


def test_tokens_whose_text_is_held_back_have_no_event_and_are_in_the_next_id() -> None:
    events = kept()

    assert events.of(Delta(0, [97], "")) == b""
    [event] = events_in(events.of(Delta(1, [98], "ab")))
    assert event.id == f"2-{checksum(b'ab'):08x}"


def test_each_event_has_token_ids_and_the_first_one_those_of_the_prompt() -> None:
    told = Told()
    told.prompts = ((1, 2),)
    events = kept(returns_token_ids=True, told=told)

    deltas = [Delta(0, [97], ""), Delta(1, [98, 99], "abc"), Delta(3, (), "", finish_reason=STOPPED)]
    sent = [events_in(events.of(delta))[0].only for delta in deltas]

    assert [one["token_ids"] for one in sent] == [[97], [98, 99], []]
    assert [one.get("prompt_token_ids") for one in sent] == [[1, 2], None, None]


def test_each_event_has_the_usage_so_far_if_the_client_asks_for_it() -> None:
    events = kept(includes_usage=True, has_usage_in_events=True)

    deltas = [Delta(0, [97], "a", prompt_tokens=5), Delta(1, [98, 99], "bc", prompt_tokens=5)]
    sent = [json.loads(events_in(events.of(delta))[0].data)["usage"]["total_tokens"] for delta in deltas]

    assert sent == [6, 8]


def test_log_probabilities_of_text_that_is_held_back_come_with_that_text() -> None:
    events = kept()

    sent = [
        events_in(events.of(Delta(0, list(b"a"), "a", logprobs=logprobs_of(b"a")))),
        events_in(events.of(Delta(1, list(b"st"), "", logprobs=logprobs_of(b"st")))),
        events_in(events.of(Delta(3, list(b"o"), "", logprobs=logprobs_of(b"o")))),
        events_in(events.of(Delta(4, (), "sto", finish_reason=CUT_OFF))),
    ]

    tokens = [[one.only["logprobs"]["tokens"] for one in found] for found in sent]
    assert tokens == [[["a"]], [["s"]], [], [["t", "o"]]]
    assert [one.id for one in sent[3]] == [f"4e-{checksum(b'asto'):08x}"]


def test_ids_count_each_choice_and_sum_up_all_of_them() -> None:
    events = kept(count=3)

    events.of(Delta(0, [97], "a", choice=2))
    [event] = events_in(events.of(Delta(0, [98], "b", choice=0)))

    both = array("I", [checksum(b"b"), 0, checksum(b"a")]).tobytes()
    assert event.id == f"1.0.1-{zlib.crc32(both):08x}"


def test_end_of_one_choice_is_told_in_the_ids_of_all_later_events() -> None:
    events = kept(count=2)

    ids = [
        events_in(events.of(delta))[0].id or ""
        for delta in (Delta(0, [97], "a"), Delta(1, (), "", finish_reason=STOPPED), Delta(0, [98], "b", choice=1))
    ]

    assert [one.partition("-")[0] for one in ids] == ["1.0", "1e.0", "1e.1"]


def test_continuation_is_told_with_the_finish() -> None:
    last = Delta(1, (), "", finish_reason=STOPPED, continuation=Continuation.PREFIX)

    assert events_in(kept().of(last))[0].only["continuation"] == "prefix"


def test_usage_has_no_id_and_that_of_the_end_marker_says_not_to_come_back() -> None:
    events = kept(includes_usage=True)

    usage, done = events_in(events.ending(Usage(3, 4)))

    assert (usage.id, done.id, done.data) == (None, "done", "[DONE]")


@pytest.mark.parametrize(("is_final", "first"), [(True, b"id: done\n"), (False, b"")])
def test_id_of_a_failure_says_not_to_come_back_if_that_is_of_no_use(is_final: bool, first: bytes) -> None:
    assert kept().failed(b"{}", is_final=is_final) == first + b"event: error\ndata: {}\n\n"


# Resumes


@dataclass
class Resume:
    """A client that has come back, and what it gets."""

    cursor: str
    count: int = 1
    kind: type[Answer] = CompletionAnswer
    bases: Sequence[int] = ()
    failures: list[Failure] = field(default_factory=list)

    def __post_init__(self) -> None:
        answer = self.kind(request_id="r", model="m", includes_usage=True)
        cursor = parse_cursor(self.cursor, "Last-Event-ID")
        bases = self.bases or [0] * self.count
        self.events = ResumedEvents(
            answer, ByteTokenizer, bases, is_chunked=False, cursor=cursor, on_failed=self.failures.append
        )

    def got(self, *deltas: Delta) -> bytes:
        return b"".join(self.events.of(delta) for delta in deltas)

    def texts(self, *deltas: Delta) -> list[str]:
        return [one.only["text"] for one in events_in(self.got(*deltas))]

    @property
    def reasons(self) -> list[str]:
        return [failure.reason for failure in self.failures]


A, B, C = (Delta(at, [token], chr(token)) for at, token in enumerate(b"abc"))
END = Delta(3, (), "", finish_reason=STOPPED, usage=Usage(1, 3))


def test_client_gets_what_comes_after_its_cursor() -> None:
    resume = Resume(f"2-{checksum(b'ab'):08x}")

    assert resume.texts(A, B) == []
    assert resume.texts(C) == ["c"]
    assert resume.reasons == []


def test_client_that_has_all_gets_usage_and_the_end_marker() -> None:
    resume = Resume(f"3e-{checksum(b'abc'):08x}")

    assert resume.got(A, B, C, END) == b""
    assert resume.reasons == []
    assert [one.data for one in events_in(resume.events.ending(Usage(1, 3)))][1:] == ["[DONE]"]


def test_client_that_lacks_only_the_finish_gets_it() -> None:
    resume = Resume(f"3-{checksum(b'abc'):08x}")

    [last] = events_in(resume.got(A, B, C, END))

    assert (last.only["finish_reason"], last.id) == ("stop", f"3e-{checksum(b'abc'):08x}")


def test_nothing_is_sent_before_the_tokens_of_all_choices_are_checked() -> None:
    both = array("I", [checksum(b"a"), checksum(b"b")]).tobytes()
    resume = Resume(f"1.1-{zlib.crc32(both):08x}", count=2)

    assert resume.texts(A, B, C) == []
    assert resume.texts(Delta(0, [98], "b", choice=1)) == ["b", "c"]


def test_ids_of_events_that_had_to_wait_count_what_the_client_has_of_other_choices() -> None:
    """Otherwise a client that is cut again would get tokens of those twice."""
    both = array("I", [0, checksum(b"b")]).tobytes()
    resume = Resume(f"0.1-{zlib.crc32(both):08x}", count=2)

    sent = events_in(resume.got(A, Delta(0, [98], "b", choice=1)))

    assert [(one.id or "").partition("-")[0] for one in sent] == ["1.1"]


@pytest.mark.parametrize(
    ("cursor", "deltas", "reason"),
    [
        ("2-00000000", [A, B, C], Reason.RESUME_DIVERGED),
        ("0-00000001", [A], Reason.RESUME_DIVERGED),
        (f"1.0-{checksum(b'a'):08x}", [A], Reason.RESUME_DIVERGED),
        (f"1e-{checksum(b'a'):08x}", [A, B], Reason.RESUME_DIVERGED),
        ("4-00000000", [A, B, C, END], Reason.CURSOR_BEYOND_END),
        ("9e-00000000", [A, B, C, END], Reason.CURSOR_BEYOND_END),
        ("9999999999-00000000", [A, B, C, END], Reason.CURSOR_BEYOND_END),
    ],
)
def test_cursor_that_does_not_fit_is_refused_and_nothing_is_sent(
    cursor: str, deltas: Sequence[Delta], reason: Reason
) -> None:
    resume = Resume(cursor)

    assert resume.got(*deltas) == b""
    assert resume.reasons == [reason]


def test_cursor_before_the_tokens_that_the_client_sent_itself_stands_for_them() -> None:
    resume = Resume("0-00000000", bases=[2])

    assert resume.texts(C) == ["c"]


def test_answer_without_a_cursor_is_sent_from_its_beginning() -> None:
    answer = CompletionAnswer(request_id="r", model="m")

    events = kept_events(answer, ByteTokenizer, [0], None, is_chunked=False, on_failed=raise_it)

    assert not isinstance(events, ResumedEvents)


# Every prefix of every answer


@dataclass
class Played:
    """A random answer: what the engine draws, and how its client wants it."""

    random: Random
    kind: type[Answer]
    tokens: list[list[int]]
    stop: Stop
    bases: list[int]
    has_logprobs: bool
    fields: dict[str, Any]

    @classmethod
    def drawn(cls, random: Random) -> "Played":
        count = random.choice([1, 1, 2, 3])
        alphabet = "ab stop é漢🎉"
        tokens = []
        for _ in range(count):
            text = "".join(random.choices(alphabet, k=random.randint(0, 12)))
            token_ids = list(text.encode())[: random.randint(0, 20)]
            tokens.append([EOS if random.random() < 0.05 else token for token in token_ids])
        strings = random.choice([(), (), ("stop",), ("to", "p é")])
        bases = [random.randint(0, len(one)) if random.random() < 0.2 else 0 for one in tokens]
        fields: dict[str, Any] = {
            "includes_usage": random.random() < 0.5,
            "has_usage_in_events": random.random() < 0.2,
            "returns_token_ids": random.random() < 0.3,
        }
        kind = random.choice(KINDS)
        if kind is CompletionAnswer and random.random() < 0.3:
            fields["echo"] = Echo(cls._request(tokens, bases, strings, "Say "), ByteTokenizer)
        stop = Stop(strings=strings)
        return cls(random, kind, tokens, stop, bases, random.random() < 0.5, fields)

    @staticmethod
    def _request(
        tokens: Sequence[Sequence[int]], bases: Sequence[int], strings: tuple[str, ...], text: str = "x"
    ) -> Request:
        brought = tuple(tuple(one[:base]) for one, base in zip(tokens, bases, strict=True))
        fields: dict[str, Any] = (
            {"generated_token_ids": brought[0]} if len(brought) == 1 else {"generated_choices": brought}
        )
        return Request(model="m", text=text, n=len(brought), stop=Stop(strings=strings), **fields)

    def answer(self) -> Answer:
        request = self._request(self.tokens, self.bases, self.stop.strings)
        brought = Brought(request) if any(self.bases) else None
        answer = self.kind(request_id="r", model="m", n=len(self.tokens), brought=brought, created=5, **self.fields)
        answer.told.prompts = ((1, 2),)
        return answer

    def deltas(self, cursor: Cursor | None = None) -> Iterator[Delta]:
        """The deltas above `Choices`: in random sizes and order, and cut at the cursor."""
        ways = [list(self._of_choice(choice, cursor)) for choice in range(len(self.tokens))]
        while any(ways):
            delta = self.random.choice([way for way in ways if way]).pop(0)
            if any(ways):
                delta.usage = None  # Only the last choice to end has it.
            yield delta

    def _of_choice(self, choice: int, cursor: Cursor | None) -> Iterator[Delta]:
        out = _List()
        detokenizer = Detokenizer(out, ByteTokenizer(), self.stop.strings)
        base, tokens = self.bases[choice], self.tokens[choice]
        detokenizer.prime(tokens[:base])
        sink = detokenizer if cursor is None else Cut(detokenizer, cursor.positions[choice])
        position = base
        while position < len(tokens) and not detokenizer.is_stopped:
            size = self.random.choice([1, 1, 2, 5])
            piece = tokens[position : position + size]
            sink.deliver(
                Delta(position, piece, choice=choice, logprobs=logprobs_of(piece) if self.has_logprobs else None)
            )
            position += len(piece)
        request = Request(model="m", token_ids=(1, 2), choice=choice)
        detokenizer.finish(request, CUT_OFF)
        return iter(out.deltas)


class _List:
    def __init__(self) -> None:
        self.deltas: list[Delta] = []

    def deliver(self, delta: Delta) -> None:
        self.deltas.append(delta)


def as_a_slow_client(random: Random, deltas: Iterator[Delta], of: Callable[[Delta], bytes]) -> Iterator[bytes]:
    """The events of a client that is slow from time to time, so that deltas are joined, once its stream has begun."""
    buffer, has_begun = DeltaBuffer(), False
    for delta in deltas:
        if not has_begun or not (buffer or random.random() < 0.3):
            event = of(delta)
            has_begun = has_begun or bool(event)
            yield event
            continue
        buffer.add(delta)
        while buffer and random.random() < 0.4:
            yield of(buffer.pop())
    while buffer:
        yield of(buffer.pop())


@dataclass
class Read:
    """What a client has put together of one choice."""

    text: str = ""
    roles: int = 0
    token_ids: list[int] = field(default_factory=list)
    prompts: list[Any] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish: str | None = None


def read(events: Sequence[Event]) -> dict[int, Read]:
    found: dict[int, Read] = {}
    for event in events:
        prompt = json.loads(event.data).get("prompt_token_ids")
        for one in event.choices:
            choice = found.setdefault(one["index"], Read())
            assert choice.finish is None
            delta = one.get("delta", {})
            choice.text += delta.get("content", "") + one.get("text", "")
            choice.roles += "role" in delta
            choice.token_ids += one.get("token_ids", ())
            choice.prompts += [one for one in (prompt, one.get("prompt_token_ids")) if one]
            choice.logprobs += entries(one["logprobs"])
            choice.finish = one["finish_reason"]
    return found


def entries(logprobs: dict[str, Any] | None) -> list[Any]:
    if logprobs is None:
        return []
    if "content" in logprobs:
        return list(logprobs["content"])
    return list(zip(*(logprobs[one] for one in ("tokens", "token_logprobs", "text_offset")), strict=True))


@pytest.mark.parametrize("seed", range(100))
def test_what_a_client_got_and_the_rest_are_the_whole_answer_wherever_it_was_cut(seed: int) -> None:
    random = Random(seed)
    played = Played.drawn(random)

    def streamed(cursor: Cursor | None) -> list[Event]:
        events = kept_events(played.answer(), ByteTokenizer, played.bases, cursor, is_chunked=False, on_failed=raise_it)
        return events_in(b"".join(as_a_slow_client(random, played.deltas(cursor), events.of)))

    whole = streamed(None)

    ids = [event.id or "" for event in whole]
    assert len(set(ids)) == len(ids)
    assert len(read(whole)) == len(played.tokens)
    for cut in range(1, len(whole) + 1):
        rest = streamed(parse_cursor(ids[cut - 1], "Last-Event-ID"))
        assert read(whole[:cut] + rest) == read(whole)
        assert [event.id for event in rest][-1:] in ([], ids[-1:])
        assert rest or cut == len(whole)


def test_end_marker_is_that_of_every_stream() -> None:
    assert kept().ending(Usage(0, 0)).endswith(b"\n" + DONE)
