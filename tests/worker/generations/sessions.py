"""Sessions of one worker without sockets: messages in, messages out, on a loop whose clock the test controls."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from services.core.call import Cause, Phase
from services.core.common_layers import Deadline, Guard
from services.rpc.framing import FrameConnection
from services.rpc.step import read_entries
from services.stubs import inference_pb2, worker_pb2
from services.worker.dispatcher import Limits
from services.worker.execute import Execute
from services.worker.generations.store import DetachConfig, GenerationStore
from services.worker.session import FrontendSession, FrontendSessionConfig
from tests.support.clock import run_clocked, settle
from tests.support.manual_worker import ManualEngine
from tests.support.raw_session import RecordingTransport
from tests.worker.generations.support import ID


def kept_submit(
    stream_id: int, prompt: int = 10, *, choices: int = 0, generation: dict[str, Any] | None = None, **fields: Any
) -> worker_pb2.Submit:
    """A submit with a generation, of epoch 1 and index 0 unless given."""
    request = inference_pb2.GenerateRequest(model="m", tokens=inference_pb2.TokenIds(ids=[prompt]), **fields)
    about: dict[str, Any] = {"id": ID, "epoch": 1, "presentation": b"how", "grace": {"seconds": 30}}
    return worker_pb2.Submit(
        stream_id=stream_id,
        request=request,
        choices=choices,
        generation=worker_pb2.Generation(**(about | (generation or {}))),
    )


def adopt(stream_id: int, epoch: int = 2, index: int = 0, generation_id: bytes = ID) -> worker_pb2.Adopt:
    return worker_pb2.Adopt(stream_id=stream_id, generation_id=generation_id, index=index, epoch=epoch)


class Frontend:
    """One frontend's session, and what it got."""

    def __init__(self, session: FrontendSession) -> None:
        self.session = session
        self.wire = RecordingTransport()
        self.connection = FrameConnection(worker_pb2.FrontendMessage, is_opener=False)
        self.connection.connection_made(self.wire)
        self.task = asyncio.ensure_future(session.serve(self.connection))

    async def send(self, **message: Any) -> None:
        self.post(**message)
        await settle()

    def post(self, **message: Any) -> None:
        """Send without giving the worker a turn of the loop."""
        self.session._on_messages([worker_pb2.FrontendMessage(**message)])

    async def leave(self) -> None:
        self.connection.connection_lost(None)
        await asyncio.wait([self.task])

    @property
    def is_over(self) -> bool:
        return self.task.done()

    @property
    def messages(self) -> list[worker_pb2.WorkerMessage]:
        data, messages = self.wire.written, []
        while data:
            size = int.from_bytes(data[:4], "big")
            messages.append(worker_pb2.WorkerMessage.FromString(data[4 : 4 + size]))
            data = data[4 + size :]
        return messages

    def token_ids(self, stream_id: int) -> list[int]:
        """The stream's tokens so far. Asserts that they have neither gap nor repeat, and none follows the end."""
        token_ids: list[int] = []
        first = None
        for message in self.messages:
            for one, position, more, _ in read_entries(message.step):
                if one == stream_id:
                    first = position if first is None else first
                    assert position == first + len(token_ids), "a gap or a repeat"
                    token_ids += more
        return token_ids

    def begun(self, stream_id: int) -> int:
        return [one for message in self.messages for one in message.begun].count(stream_id)

    def end(self, stream_id: int) -> str | None:
        """How the stream ended: the name of a finish reason, or the reason of a failure."""
        ends = [end for message in self.messages for end in message.ends if end.stream_id == stream_id]
        assert len(ends) <= 1, "a stream ended twice"
        if not ends:
            return None
        return ends[0].error.reason or inference_pb2.FinishReason.Name(ends[0].finish_reason)

    @property
    def located(self) -> Sequence[worker_pb2.Located]:
        return [one for message in self.messages for one in message.located]


class Worker:
    """A worker with real admission on an engine that the test steps."""

    def __init__(self, slots: int = 2, places: int = 3, **config: Any) -> None:
        self.engine = ManualEngine()
        self.execute = Execute(self.engine, Limits(slots=slots, places=places))
        self.engine.attach(self.execute.emit)
        self.pipeline = Guard(Deadline(self.execute))
        self.detach = config.pop("detach", DetachConfig())
        self.store = GenerationStore(self.pipeline, self.detach)
        self._config = FrontendSessionConfig(heartbeat_s=1e6, **config)
        self._frontends: list[Frontend] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Worker"]:
        async with self.store:
            try:
                yield self
            finally:
                for frontend in self._frontends:
                    frontend.task.cancel()
                await asyncio.wait([frontend.task for frontend in self._frontends])

    async def attach(self) -> Frontend:
        welcome = worker_pb2.Welcome(engine_request_limit=2, request_queue_limit=3)
        session = FrontendSession(
            self.pipeline,
            welcome,
            worker_pb2.Load,
            lambda: self.busy > 0,
            self.execute.counters,
            self.store,
            self._config,
        )
        self._frontends.append(Frontend(session))
        await settle()
        return self._frontends[-1]

    @property
    def key(self) -> int:
        """The engine's key of its only request."""
        (key,) = self.engine.requests
        return key

    @property
    def busy(self) -> int:
        """How many slots and places are taken."""
        return self.execute.running_count + self.execute.waiting_count

    @property
    def cancelled(self) -> dict[tuple[Cause, Phase], int]:
        """The counts of cancels. Asserts that those of the engine agree with them."""
        counters = self.execute.counters
        on_engine = sum(count for (_, phase), count in counters.cancelled.items() if phase in ("prefill", "running"))
        assert counters.aborted == on_engine
        return dict(counters.cancelled)


def play(scenario: Callable[[Worker], Coroutine[Any, Any, Any]], **config: Any) -> Any:
    async def run() -> Any:
        async with Worker(**config).running() as worker:
            return await scenario(worker)

    return run_clocked(run())
