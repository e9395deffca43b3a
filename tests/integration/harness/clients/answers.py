"""The answers that test clients receive, from both protocols, checked item by item against the protocol's rules."""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

from services.stubs import inference_pb2
from tests.integration.harness.clients.requests import Request

OnTokens = Callable[[int], None]
FINISH = {inference_pb2.FINISH_REASON_STOP: "stop", inference_pb2.FINISH_REASON_LENGTH: "length"}

CONTINUATION = {inference_pb2.CONTINUATION_UNSPECIFIED: None, inference_pb2.CONTINUATION_PREFIX: "prefix"}


@dataclass(frozen=True)
class Choice:
    """One choice of an answer.

    `token_ids`: None over HTTP. `logprobs`: one per token, in the protocol's own form. `continuation`: after a move.
    """

    text: str
    finish: str
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[Any, ...] = ()
    continuation: str | None = None


@dataclass(frozen=True)
class Answer:
    """A complete answer."""

    choices: tuple[Choice, ...]
    prompt_tokens: int
    completion_tokens: int

    @property
    def only(self) -> Choice:
        (choice,) = self.choices
        return choice

    @property
    def text(self) -> str:
        return self.only.text

    @property
    def finish(self) -> str:
        return self.only.finish

    @property
    def token_ids(self) -> tuple[int, ...] | None:
        return self.only.token_ids

    @property
    def essence(self) -> "Answer":
        """The answer reduced to what every protocol shows."""
        choices = tuple(replace(choice, token_ids=None, logprobs=()) for choice in self.choices)
        return replace(self, choices=choices)


class Refused(Exception):
    """The request failed.

    `code`: the HTTP status, or the name of the gRPC status. `error`: the error envelope, or the ErrorInfo in the same
    form.
    """

    def __init__(self, code: int | str, error: dict[str, Any], headers: Any = None, received: str = "") -> None:
        super().__init__(code, error)
        assert "127.0.0.1" not in str(error), "an error must not reveal the addresses of workers"
        self.code = code
        self.error = error
        self.headers = headers or {}
        self.received = received

    @property
    def reason(self) -> str:
        return str(self.error["code"])

    @property
    def metadata(self) -> dict[str, str]:
        """The error's further fields, from either protocol."""
        metadata: dict[str, str] = self.error.get("metadata", self.error)
        return metadata

    @property
    def is_deadline(self) -> bool:
        """Whether the deadline has passed. Over gRPC the client's own timer may fire first, without a reason."""
        return "DEADLINE_EXCEEDED" in (self.reason, self.code)


@dataclass
class _Growing:
    """One choice of an answer that is still arriving."""

    text: str = ""
    finish: str | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    continuation: str | None = None

    def choice(self, *, shows_tokens: bool) -> Choice:
        assert self.finish is not None, "the stream ended without a finish reason"
        token_ids = tuple(self.token_ids) if shows_tokens else None
        return Choice(self.text, self.finish, token_ids, tuple(self.logprobs), self.continuation)


def _in_order(growing: Mapping[int, _Growing], *, shows_tokens: bool) -> tuple[Choice, ...]:
    assert sorted(growing) == list(range(len(growing))), f"choices {sorted(growing)}"
    return tuple(growing[index].choice(shows_tokens=shows_tokens) for index in sorted(growing))


# HTTP


def entries(logprobs: dict[str, Any] | None, request: Request) -> list[Any]:
    """Return OpenAI's log probabilities, one entry per token."""
    if logprobs is None:
        return []
    if request.is_chat:
        return list(logprobs["content"])
    columns = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return list(zip(*(logprobs[column] for column in columns), strict=True))


def whole(answer: dict[str, Any], request: Request) -> Answer:
    """Parse a unary response."""
    choices = []
    for index, one in enumerate(answer["choices"]):
        assert one["index"] == index
        text = one["message"]["content"] if request.is_chat else one["text"]
        logprobs = tuple(entries(one["logprobs"], request))
        choices.append(Choice(text, one["finish_reason"], logprobs=logprobs, continuation=one.get("continuation")))
    usage = answer["usage"]
    return Answer(tuple(choices), usage["prompt_tokens"], usage["completion_tokens"])


@dataclass
class Events:
    """Parses the events of one streamed answer."""

    request: Request
    on_tokens: OnTokens
    choices: dict[int, _Growing] = field(default_factory=lambda: defaultdict(_Growing))
    usage: dict[str, int] | None = None
    is_done: bool = False
    _is_error: bool = False

    async def read(self, response: aiohttp.ClientResponse) -> Answer:
        """Read the stream to its end. Raises Refused for an error event."""
        async for line in response.content:
            self._read_line(line)
        return self.answer()

    def take(self, body: bytes) -> Answer:
        """Parse a body that has already been received."""
        for line in body.splitlines():
            self._read_line(line)
        return self.answer()

    def answer(self) -> Answer:
        """Return the answer, which must be complete."""
        assert self.is_done, "the stream ended without [DONE]"
        assert self.usage is not None, "[DONE] came without the requested usage"
        choices = _in_order(self.choices, shows_tokens=False)
        return Answer(choices, self.usage["prompt_tokens"], self.usage["completion_tokens"])

    def _read_line(self, raw: bytes) -> None:
        line = raw.decode().rstrip("\n")
        assert not self.is_done or not line, f"after [DONE]: {line}"
        if line == "event: error":
            self._is_error = True
        elif line.startswith("data: "):
            if self._is_error:
                received = "".join(choice.text for choice in self.choices.values())
                raise Refused(200, json.loads(line[6:])["error"], received=received)
            self._take(line[6:])

    def _take(self, data: str) -> None:
        if data == "[DONE]":
            self.is_done = True
            return
        event = json.loads(data)
        self.usage = event.get("usage") or self.usage
        for one in event["choices"]:
            choice = self.choices[one["index"]]
            assert choice.finish is None, "a choice continued after its finish reason"
            choice.finish, choice.continuation = one["finish_reason"], one.get("continuation")
            choice.text += one["delta"].get("content", "") if self.request.is_chat else one["text"]
            choice.logprobs += entries(one["logprobs"], self.request)
        self.on_tokens(sum(len(choice.text.encode()) for choice in self.choices.values()))


# gRPC


@dataclass
class Items:
    """Checks and collects the items of one Generate stream."""

    request: Request
    on_tokens: OnTokens
    choices: dict[int, _Growing] = field(default_factory=lambda: defaultdict(_Growing))
    usage: inference_pb2.Usage | None = None
    is_complete: bool = False

    @property
    def received(self) -> str:
        return "".join(choice.text for choice in self.choices.values())

    def take(self, item: inference_pb2.GenerateResponse) -> None:
        assert not self.is_complete, "an item after complete_final"
        assert item.HasField("delta") != item.complete_final, "an item must be either a delta or the marker"
        self.is_complete = item.complete_final
        if item.HasField("delta"):
            self._take(item.delta)
            self.on_tokens(sum(len(choice.token_ids) for choice in self.choices.values()))

    def _take(self, delta: inference_pb2.Delta) -> None:
        assert self.usage is None, "a delta after the usage"
        choice = self.choices[delta.choice]
        if choice.finish is not None:
            has_content = bool(delta.token_ids or delta.text or delta.finish_reason)
            assert delta.HasField("usage") > has_content, "a delta after the finish reason"
            self.usage = delta.usage
            return
        assert delta.position == len(choice.token_ids), f"{delta.position} after {len(choice.token_ids)} tokens"
        assert len(delta.logprobs) == (0 if self.request.logprobs is None else len(delta.token_ids))
        choice.token_ids += delta.token_ids
        choice.text += delta.text
        choice.logprobs += [(one.logprob, *one.top_token_ids, *one.top_logprobs) for one in delta.logprobs]
        choice.finish = FINISH[delta.finish_reason] if delta.finish_reason else None
        choice.continuation = CONTINUATION[delta.continuation]
        if delta.HasField("usage"):
            self.usage = delta.usage

    def answer(self) -> Answer:
        assert self.is_complete, "the stream ended without complete_final"
        assert self.usage is not None, "complete_final without usage"
        choices = _in_order(self.choices, shows_tokens=True)
        return Answer(choices, self.usage.prompt_tokens, self.usage.completion_tokens)
