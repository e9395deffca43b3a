"""The clients of the tests, over both protocols: what they ask, and what they got, checked item by item."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import aiohttp
import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from services.rpc import CHANNEL_OPTIONS
from services.stubs import inference_pb2, inference_pb2_grpc
from tests.integration.plane import Frontend, until

PROTOCOLS = ("grpc", "stream", "unary")
REQUEST_S_MAX = 40.0
T = TypeVar("T")
OnTokens = Callable[[int], None]
Nemesis = Callable[[], Awaitable[None]]
FINISH = {inference_pb2.FINISH_REASON_STOP: "stop", inference_pb2.FINISH_REASON_LENGTH: "length"}


@dataclass(frozen=True)
class Ask:
    """A request, in the terms that both protocols have. protocol: one of PROTOCOLS; the last two are HTTP."""

    protocol: str = "stream"
    is_chat: bool = False
    temperature: float = 0.0
    prompt: str = "Say something"
    max_tokens: int = 60
    stop: str | None = None
    model: str = "mocker"
    ignore_eos: bool = True
    seed: int = 7
    request_id: str = ""

    def __str__(self) -> str:
        """What a test's id says of it."""
        kind, draw = "chat" if self.is_chat else "text", "seeded" if self.temperature else "greedy"
        return f"{self.protocol}-{kind}-{draw}"

    def named(self, request_id: str, **fields: Any) -> "Ask":
        return replace(self, request_id=request_id, **fields)


@dataclass(frozen=True)
class Answer:
    """What a client got. Token ids are None over HTTP, which does not show them."""

    text: str
    finish: str
    prompt_tokens: int
    completion_tokens: int
    token_ids: tuple[int, ...] | None = None


class Refused(Exception):
    """The request failed. code: HTTP status or name of the gRPC status; error: the envelope, or ErrorInfo alike."""

    def __init__(self, code: int | str, error: dict[str, Any], headers: Any = None, received: str = "") -> None:
        super().__init__(code, error)
        self.code = code
        self.error = error
        self.headers = headers or {}
        self.received = received

    @property
    def reason(self) -> str:
        return str(self.error["code"])


def _ignore(_: int) -> None:
    pass


async def answer(frontend: Frontend, ask: Ask, on_tokens: OnTokens = _ignore) -> Answer:
    """Ask, and check that all rules of a stream hold. on_tokens: called with the bytes or tokens got so far.

    Raises Refused.
    """
    if ask.protocol == "grpc":
        return await _answer_grpc(frontend.grpc, ask, on_tokens)
    timeout = aiohttp.ClientTimeout(total=REQUEST_S_MAX)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(
            f"{frontend.http}{path(ask)}",
            json=body(ask),
            headers={"X-Request-Id": ask.request_id} if ask.request_id else {},
        ) as response,
    ):
        if response.status != 200:
            raise Refused(response.status, (await response.json())["error"], response.headers)
        if ask.protocol == "unary":
            return _whole(await response.json(), ask)
        return await _Events(ask, on_tokens).read(response)


# HTTP


def path(ask: Ask) -> str:
    return "/v1/chat/completions" if ask.is_chat else "/v1/completions"


def headers(ask: Ask) -> dict[str, str]:
    return {"X-Request-Id": ask.request_id} if ask.request_id else {}


def body(ask: Ask) -> dict[str, Any]:
    """The JSON body."""
    fields: dict[str, Any] = {
        "model": ask.model,
        "max_tokens": ask.max_tokens,
        "temperature": ask.temperature,
        "seed": ask.seed,
        "ignore_eos": ask.ignore_eos,
        "stop": ask.stop,
    }
    if ask.is_chat:
        fields["messages"] = [{"role": "user", "content": ask.prompt}]
    else:
        fields["prompt"] = ask.prompt
    if ask.protocol == "stream":
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    return fields


def _whole(answer: dict[str, Any], ask: Ask) -> Answer:
    (choice,) = answer["choices"]
    text = choice["message"]["content"] if ask.is_chat else choice["text"]
    usage = answer["usage"]
    return Answer(text, choice["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"])


@dataclass
class _Events:
    """Reads the events of one streamed answer."""

    ask: Ask
    on_tokens: OnTokens
    text: str = ""
    finish: str | None = None
    usage: dict[str, int] | None = None
    is_done: bool = False

    async def read(self, response: aiohttp.ClientResponse) -> Answer:
        is_error = False
        async for raw in response.content:
            line = raw.decode().rstrip("\n")
            assert not self.is_done or not line, f"after [DONE]: {line}"
            if line == "event: error":
                is_error = True
            elif line.startswith("data: "):
                if is_error:
                    raise Refused(response.status, json.loads(line[6:])["error"], received=self.text)
                self._take(line[6:])
        assert self.is_done, "the stream ended without [DONE]"
        assert self.finish is not None, "[DONE] without a finish reason"
        assert self.usage is not None, "[DONE] without the usage that was asked for"
        return Answer(self.text, self.finish, self.usage["prompt_tokens"], self.usage["completion_tokens"])

    def _take(self, data: str) -> None:
        if data == "[DONE]":
            self.is_done = True
            return
        event = json.loads(data)
        self.usage = event.get("usage") or self.usage
        for choice in event["choices"]:
            piece = choice["delta"].get("content", "") if self.ask.is_chat else choice["text"]
            assert self.finish is None, "a choice goes on after its finish reason"
            self.finish = choice["finish_reason"]
            self.text += piece
        self.on_tokens(len(self.text.encode()))


# gRPC


def request(ask: Ask) -> inference_pb2.GenerateRequest:
    """The message."""
    message = inference_pb2.GenerateRequest(model=ask.model, request_id=ask.request_id)
    if ask.is_chat:
        message.chat.messages.add(role="user", content=ask.prompt)
    else:
        message.text = ask.prompt
    message.sampling.temperature, message.sampling.seed = ask.temperature, ask.seed
    message.stop.max_tokens, message.stop.ignore_eos = ask.max_tokens, ask.ignore_eos
    if ask.stop is not None:
        message.stop.strings.append(ask.stop)
    return message


async def _answer_grpc(address: str, ask: Ask, on_tokens: OnTokens) -> Answer:
    items = _Items(on_tokens)
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request(ask), timeout=REQUEST_S_MAX)
        try:
            while isinstance(item := await call.read(), inference_pb2.GenerateResponse):
                items.take(item)
        except grpc.aio.AioRpcError as error:
            raise refusal_of(error, items.text) from None
    return items.answer()


def refusal_of(error: grpc.aio.AioRpcError, received: str = "") -> Refused:
    """The status and its ErrorInfo, as the HTTP envelope has them."""
    status = rpc_status.from_call(error)
    fields: dict[str, Any] = {"message": error.details(), "code": None}
    for detail in status.details if status is not None else ():
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            assert info.domain == "unbroken"
            fields |= dict(info.metadata) | {"code": info.reason}
        elif detail.Unpack(retry):
            fields["retry_after_s"] = retry.retry_delay.seconds + retry.retry_delay.nanos * 1e-9
    return Refused(error.code().name, fields, received=received)


@dataclass
class _Items:
    """Takes the items of one Generate stream."""

    on_tokens: OnTokens
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    last: inference_pb2.Delta | None = None
    is_complete: bool = False

    def take(self, item: inference_pb2.GenerateResponse) -> None:
        assert not self.is_complete, "an item after complete_final"
        assert item.HasField("delta") != item.complete_final, "an item is a delta or the marker"
        self.is_complete = item.complete_final
        if self.is_complete:
            return
        assert self.last is None, "a delta after the finish reason"
        assert item.delta.position == len(self.token_ids), f"{item.delta.position} after {len(self.token_ids)} tokens"
        self.token_ids += item.delta.token_ids
        self.text += item.delta.text
        if item.delta.finish_reason:
            self.last = item.delta
        self.on_tokens(len(self.token_ids))

    def answer(self) -> Answer:
        assert self.is_complete, "the stream ended without complete_final"
        assert self.last is not None, "complete_final without a finish reason"
        usage, finish = self.last.usage, FINISH[self.last.finish_reason]
        return Answer(self.text, finish, usage.prompt_tokens, usage.completion_tokens, tuple(self.token_ids))


async def gathered(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all, which run at the same time."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(coroutine) for coroutine in coroutines]
    return [task.result() for task in tasks]


async def under_streams(
    frontend: Frontend, asks: Sequence[Ask], nemesis: Callable[[], Awaitable[None]]
) -> list[Answer]:
    """All answers, with `nemesis` striking when every streamed one has begun. Their request ids are s0, s1, …"""
    begun: set[int] = set()

    def noting(number: int) -> OnTokens:
        return lambda _: begun.add(number)

    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(answer(frontend, ask.named(f"s{number}"), noting(number)))
            for number, ask in enumerate(asks)
        ]
        await until(lambda: len(begun) == sum(ask.protocol != "unary" for ask in asks))
        await nemesis()
    return [task.result() for task in tasks]


def move_reasons(frontend: Frontend, asks: Sequence[Ask]) -> list[list[str]]:
    """For each of the asks `under_streams` the reasons of its moves."""
    return [[move["reason"] for move in frontend.moves(f"s{number}")] for number in range(len(asks))]


@asynccontextmanager
async def ballast(frontend: Frontend, model: str = "mocker") -> AsyncIterator[None]:
    """Keeps the healthy worker the busier one, so that routing gives the next request to the one that will die."""
    begun = asyncio.Event()
    ask = Ask(model=model, max_tokens=100_000)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(answer(frontend, ask, lambda _: begun.set()))
        await begun.wait()
        yield
        task.cancel()
