"""Doubles for tests of the worker: an engine and a pipeline that the test drives, and a raw client of a session."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from services.core.call import Call
from services.core.interface import Delta, Finish, Layer, Sink
from services.core.model_card import ModelCard
from services.core.request import FinishReason, Request
from services.rpc.status import CHANNEL_OPTIONS
from services.rpc.step import read_entries
from services.stubs import inference_pb2, worker_pb2, worker_pb2_grpc
from services.worker.dispatcher import Limits
from services.worker.engine import Emit, EngineLoad, Output, RankLoad
from services.worker.execute import Execute
from services.worker.listener import SessionListener
from services.worker.service import WorkerService
from services.worker.session import FrontendSessionConfig
from tests.http.rpcs import serving_at
from tests.support.doubles import CARD
from tests.support.raw_session import RawSession, open_raw_session


class ManualEngine:
    """Records its requests; `step` emits. The next submit raises `refusal`, and every cancel raises `cancel_bug`."""

    def __init__(self, request_limit: int = 1024, content: bytes = b"", card: ModelCard = CARD) -> None:
        self.card = card
        self.request_limit = request_limit
        self.requests: dict[int, Request] = {}
        self.submitted: list[Request] = []
        self.running_count_max = 0
        self.refusal: Exception | None = None
        self.cancel_bug: Exception | None = None
        self._content = content
        self._emit: Emit | None = None
        self._has_more = asyncio.Event()

    def tokenizer_content(self) -> bytes:
        return self._content

    def attach(self, emit: Emit) -> None:
        self._emit = emit

    async def run(self, emit: Emit, ready: asyncio.Event) -> None:
        self.attach(emit)
        ready.set()
        await asyncio.Event().wait()

    def submit(self, key: int, request: Request) -> None:
        if self.refusal is not None:
            refusal, self.refusal = self.refusal, None
            raise refusal
        assert key not in self.requests
        self.requests[key] = request
        self.submitted.append(request)
        self.running_count_max = max(self.running_count_max, len(self.requests))
        self._has_more.set()

    async def wait_submitted(self, count: int) -> None:
        """Wait until `count` requests have been submitted since the start."""
        while len(self.submitted) < count:
            self._has_more.clear()
            await self._has_more.wait()

    def cancel(self, key: int) -> None:
        self.requests.pop(key, None)
        if self.cancel_bug is not None:
            raise self.cancel_bug

    def load(self) -> EngineLoad:
        return EngineLoad(7, (RankLoad(len(self.requests), 9, 3, dp_rank=2),))

    def step(self, *outputs: Output) -> None:
        assert self._emit is not None
        for output in outputs:
            if output.finish is not None or output.failure is not None:
                self.requests.pop(output.key, None)
        self._emit(outputs)

    def give(self, key: int, token_ids: Sequence[int], finish: FinishReason | None = None) -> None:
        self.step(Output(key, token_ids, finish))

    def key_of(self, prompt: Sequence[int]) -> int:
        return next(key for key, request in self.requests.items() if request.token_ids == tuple(prompt))


@dataclass
class PendingCall:
    """One call of ManualLayer, which the test answers."""

    request: Request
    call: Call
    sink: Sink
    ended: asyncio.Future[Finish]
    position: int = 0
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    def deliver(self, *token_ids: int) -> None:
        self.sink.deliver(Delta(self.position, list(token_ids)))
        self.position += len(token_ids)


class ManualLayer:
    """A pipeline whose calls the test answers. A call is identified by the first token of its prompt."""

    def __init__(self) -> None:
        self._calls: dict[int, PendingCall] = {}
        self._changed = asyncio.Condition()

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        pending = PendingCall(request, call, sink, asyncio.get_running_loop().create_future())
        async with self._changed:
            self._calls[request.prompt_token_ids[0]] = pending
            self._changed.notify_all()
        try:
            return await pending.ended
        except asyncio.CancelledError:
            pending.cancelled.set()
            raise

    async def wait_called(self, prompt: int) -> PendingCall:
        async with self._changed:
            await self._changed.wait_for(lambda: prompt in self._calls)
        return self._calls[prompt]


def submit(stream_id: int, prompt: int, **fields: Any) -> worker_pb2.Submit:
    request = inference_pb2.GenerateRequest(model="m", tokens=inference_pb2.TokenIds(ids=[prompt]), **fields)
    return worker_pb2.Submit(stream_id=stream_id, request=request)


class RawFrontend:
    """A frontend's end of a session, without our client code, and the messages received on it."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._session: RawSession | None = None
        self.messages: list[worker_pb2.WorkerMessage] = []
        self.is_over = False

    async def session(self) -> RawSession:
        """The session, opened on first use."""
        if self._session is None:
            self._session = await open_raw_session(self._address)
        return self._session

    async def send(self, *submits: worker_pb2.Submit, cancels: Sequence[int] = ()) -> None:
        await (await self.session()).send(worker_pb2.FrontendMessage(submits=submits, cancels=cancels))

    async def read(self) -> None:
        """Read one message, or the end of the session."""
        message = await (await self.session()).read()
        self.is_over = message is None
        if not self.is_over:
            self.messages.append(message)

    def close(self) -> None:
        if self._session is not None:
            self._session.abort()

    async def __aenter__(self) -> "RawFrontend":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def until(self, condition: Callable[[], Any]) -> Any:
        while not (value := condition()):
            assert not self.is_over, "the session ended first"
            await self.read()
        return value

    async def until_over(self) -> None:
        while not self.is_over:
            await self.read()

    def entries(self, stream_id: int) -> list[tuple[int, list[int]]]:
        """(position, tokens) of the stream's entries so far."""
        return [
            (position, token_ids)
            for message in self.messages
            for one, position, token_ids, _ in read_entries(message.step)
            if one == stream_id
        ]

    def token_ids(self, stream_id: int) -> list[int]:
        return [token for _, token_ids in self.entries(stream_id) for token in token_ids]

    def begun(self) -> list[int]:
        return [stream_id for message in self.messages for stream_id in message.begun]

    def end(self, stream_id: int) -> worker_pb2.StreamEnd | None:
        ends = [end for message in self.messages for end in message.ends if end.stream_id == stream_id]
        assert len(ends) <= 1, "a stream ended twice"
        return ends[0] if ends else None


@dataclass
class Served:
    """A WorkerService behind real listeners. `address`: of its sessions. `stub`: of its gRPC services."""

    service: WorkerService
    execute: Execute
    address: str
    stub: Any

    frontends: list[RawFrontend] = field(default_factory=list)

    def attach(self) -> RawFrontend:
        """Open a session. It is closed at the end of the test at the latest."""
        self.frontends.append(RawFrontend(self.address))
        return self.frontends[-1]

    def load(self) -> tuple[int, int]:
        """The numbers of running and of waiting requests."""
        return self.execute.running_count, self.execute.waiting_count

    @property
    def session_count(self) -> int:
        return session_count(self.service)


def session_count(service: WorkerService) -> int:
    """How many frontends have a session. The wire does not show when one has left, so this reads private state."""
    return len(service._sessions)


@asynccontextmanager
async def serving(
    pipeline: Layer, *, engine: ManualEngine | None = None, execute: Execute | None = None, **config: Any
) -> AsyncIterator[Served]:
    engine = engine or ManualEngine()
    execute = execute or Execute(engine, Limits(slots=2, places=3))
    service = WorkerService("w1", engine, execute, pipeline, FrontendSessionConfig(**config))
    async with (
        service.generations,
        serving_at((worker_pb2_grpc.add_WorkerServicer_to_server, service)) as address,
        SessionListener(service.attach) as listener,
        connected(address) as stub,
    ):
        served = Served(service, execute, await listener.start("127.0.0.1:0"), stub)
        try:
            yield served
        finally:
            for frontend in served.frontends:
                frontend.close()


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        yield worker_pb2_grpc.WorkerStub(channel)
