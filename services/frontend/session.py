"""The frontend's end of one session: all requests to one worker on one stream, and the proof that the worker lives.

| event on the session | what its streams get | the session |
| --- | --- | --- |
| cannot be opened, or no welcome in time | – | CANNOT_CONNECT |
| broken connection | DISCONNECTED | over |
| the worker ends it in order | STREAM_INCOMPLETE | over |
| silence, or an engine that stands still | STALLED | over |
| a message that can't be read, or an item after `complete_final` | PROTOCOL_VIOLATION | over |
| an item of one stream that breaks the rules | PROTOCOL_VIOLATION, that stream | goes on |

A stream whose finish reason has come ends well, whatever happens to the session before `complete_final`.
"""

import asyncio
from collections import OrderedDict, deque
from dataclasses import dataclass
from itertools import count

import grpc
import structlog

from services.card import ModelCard
from services.discovery import InstanceRecord
from services.errors import Failure, Reason
from services.frontend.stream import Stream
from services.layers import root_cause
from services.request import Call, Request, Sink
from services.rpc import failure_of, time_left_s
from services.stubs import worker_pb2, worker_pb2_grpc
from services.wire import card_from_wire, logprobs_from_wire, request_to_wire, seconds_from_wire, seconds_to_wire

log = structlog.get_logger()

Attachment = grpc.aio.StreamStreamCall[worker_pb2.AttachRequest, worker_pb2.AttachResponse]
MESSAGE_TOKENS_MAX = 500_000
"""Prompt tokens after which submits of one turn of the loop go on in another message: well below MESSAGE_BYTES_MAX."""
COMPLETED_KEPT = 4096
"""How many completed stream ids a session remembers, to notice items that follow `complete_final`."""
UNREADABLE = (grpc.StatusCode.INTERNAL, grpc.StatusCode.RESOURCE_EXHAUSTED)
"""What gRPC ends a stream with, on our side of it, when a message has no sound frame or is above the bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    """connect_timeout_s: until the welcome. stall_s: silence that makes a worker with streams of ours a lost one.

    idle_stall_s: the same for one without. engine_stall_s: how long the step counter may stand still while sequences
    run and no prefill explains it. full_s: how long a refusal for capacity counts, unless a load report comes first.
    """

    connect_timeout_s: float = 2.0
    stall_s: float = 1.0
    idle_stall_s: float = 10.0
    engine_stall_s: float = 5.0
    full_s: float = 1.0


class Session:
    """One session to one worker; it is opened by `run` and never opened again: a reconnect is a new session."""

    _numbers = count(1)

    def __init__(self, record: InstanceRecord, config: SessionConfig) -> None:
        loop = asyncio.get_running_loop()
        self.record = record
        self.key = f"{record.instance_id}#{next(self._numbers)}"
        self.load = worker_pb2.Load()
        self.is_draining = False
        self.quarantined_until = 0.0
        self._card: ModelCard | None = None
        self._config = config
        self._clock = loop.time
        self._streams: dict[int, Stream] = {}
        self._stream_ids = count(1)
        self._completed: OrderedDict[int, None] = OrderedDict()
        self._outgoing = deque([worker_pb2.AttachRequest()])
        self._outgoing_tokens = 0
        self._has_outgoing = asyncio.Event()
        self._lost: asyncio.Future[None] = loop.create_future()
        self._full_until = 0.0
        self._heard_at = self._stepped_at = self._clock()

    @property
    def card(self) -> ModelCard:
        """The worker's card, once welcome has come."""
        assert self._card is not None, "no welcome yet"
        return self._card

    @property
    def in_flight_count(self) -> int:
        """Our own requests on it."""
        return len(self._streams)

    @property
    def is_lost(self) -> bool:
        return self._lost.done()

    def is_full(self) -> bool:
        """It refused for capacity, no load report has come since, and that is not long ago."""
        return self._clock() < self._full_until

    def mark_full(self) -> None:
        self._full_until = self._clock() + self._config.full_s

    # Requests

    def open(self, request: Request, call: Call, sink: Sink) -> Stream:
        """Send the request. The caller awaits `ended` of what is returned and then closes it."""
        if self.is_lost:
            raise Failure(Reason.DISCONNECTED, f"the session to {self.record.address} is over")
        if not self._streams:
            self._heard_at = self._stepped_at = self._clock()  # An idle worker was allowed its silence.
        stream = Stream(next(self._stream_ids), request, call.attempt, sink)
        self._streams[stream.id] = stream
        self._make_room(len(request.prompt_token_ids) + len(request.generated_token_ids))
        submit = self._outgoing[-1].submits.add(stream_id=stream.id, request=request_to_wire(request))
        submit.request.request_id = call.request_id
        if (left_s := time_left_s(call.deadline)) is not None:
            submit.timeout.CopyFrom(seconds_to_wire(left_s))
        self._has_outgoing.set()
        return stream

    def _make_room(self, token_count: int) -> None:
        """Begin another message where this one would become too large."""
        self._outgoing_tokens += token_count
        if self._outgoing_tokens > MESSAGE_TOKENS_MAX:
            self._outgoing.append(worker_pb2.AttachRequest())
            self._outgoing_tokens = token_count

    def close(self, stream: Stream) -> None:
        """Forget the stream, and tell the worker if it has not ended. Late tokens reach nobody."""
        if self._streams.pop(stream.id, None) is not None and not self.is_lost:
            self._outgoing[-1].cancels.append(stream.id)
            self._has_outgoing.set()

    # The worker's messages

    async def run(self, stub: "worker_pb2_grpc.WorkerAsyncStub", on_welcome: asyncio.Event) -> None:
        """Open the session and keep it until it is lost; raises the Failure that says how."""
        call = stub.Attach()
        try:
            await self._await_welcome(call)
            on_welcome.set()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read(call))
                group.create_task(self._write(call))
                await self._lost
        except ExceptionGroup as group:
            raise root_cause(group) from None
        finally:
            self.lose(Failure(Reason.DISCONNECTED, "the frontend closed the session"))
            self._lost.exception()  # Whoever cancels `run` does not ask for it.
            call.cancel()

    async def _await_welcome(self, call: Attachment) -> None:
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                message = await call.read()
        except TimeoutError:
            detail = f"no welcome from {self.record.address} within {self._config.connect_timeout_s} s"
            raise Failure(Reason.CANNOT_CONNECT, detail) from None
        except grpc.aio.AioRpcError as error:
            raise failure_of(error, otherwise=Reason.CANNOT_CONNECT) from error
        if isinstance(message, worker_pb2.AttachResponse) and message.HasField("welcome"):
            self._card = card_from_wire(message.welcome.card)
            self._on_message(message)
        else:
            raise Failure(Reason.CANNOT_CONNECT, f"{self.record.address} did not begin with a welcome")

    async def _read(self, call: Attachment) -> None:
        try:
            while isinstance(message := await call.read(), worker_pb2.AttachResponse):
                self._on_message(message)
            if message is None:  # gRPC logs a message that it can't decode, and hands out None in its place.
                raise Failure(Reason.PROTOCOL_VIOLATION, f"{self.record.address} sent what can't be decoded")
            self.lose(Failure(Reason.STREAM_INCOMPLETE, f"{self.record.address} ended the session"))
        except grpc.aio.AioRpcError as error:
            is_refused = error.code() in UNREADABLE
            self.lose(failure_of(error, otherwise=Reason.PROTOCOL_VIOLATION if is_refused else Reason.DISCONNECTED))
        except Failure as failure:
            self.lose(failure)

    async def _write(self, call: Attachment) -> None:
        try:
            while True:
                await self._has_outgoing.wait()
                self._has_outgoing.clear()
                messages, self._outgoing = self._outgoing, deque([worker_pb2.AttachRequest()])
                self._outgoing_tokens = 0
                for message in messages:
                    await call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            self.lose(Failure(Reason.DISCONNECTED, f"cannot write to {self.record.address}: {error}"))

    def _on_message(self, message: worker_pb2.AttachResponse) -> None:
        self._heard_at = self._clock()
        if message.HasField("load"):
            if message.load.engine_steps != self.load.engine_steps:
                self._stepped_at = self._heard_at
            self.load = message.load
            self._full_until = 0.0
        if message.HasField("goaway"):
            self.is_draining = True
            for stream in list(self._streams.values()):
                stream.attempt.on_leaving(seconds_from_wire(message.goaway.grace))
        if message.HasField("step"):
            self._on_step(message.step)
        for end in message.ends:
            self._on_end(end)

    def _on_step(self, step: worker_pb2.Step) -> None:
        self._stepped_at = self._heard_at
        token_ids, start = list(step.token_ids), 0
        logprobs = {one.entry: one.tokens for one in step.logprobs}
        entries = zip(step.stream_ids, step.positions, step.token_counts, strict=False)
        for index, (stream_id, position, length) in enumerate(entries):
            stop = start + length
            if (stream := self._find(stream_id)) is not None:
                try:
                    ours = [logprobs_from_wire(one) for one in logprobs[index]] if index in logprobs else None
                    stream.on_tokens(position, token_ids[start:stop], ours)
                except Failure as failure:
                    self._drop(stream, failure)
            start = stop

    def _on_end(self, end: worker_pb2.StreamEnd) -> None:
        stream = self._find(end.stream_id)
        if stream is None:
            return
        try:
            stream.on_end(end)
        except Failure as failure:
            self._drop(stream, failure)
        if stream.ended.done():
            self._streams.pop(stream.id, None)
            self._completed[stream.id] = None
            if len(self._completed) > COMPLETED_KEPT:
                self._completed.popitem(last=False)

    def _find(self, stream_id: int) -> Stream | None:
        """The stream; None if it was closed by us. Raises PROTOCOL_VIOLATION if the worker itself had ended it."""
        stream = self._streams.get(stream_id)
        if stream is None and stream_id in self._completed:
            raise Failure(Reason.PROTOCOL_VIOLATION, f"{self.record.address} went on with a stream after its end")
        return stream

    def _drop(self, stream: Stream, failure: Failure) -> None:
        log.warning("worker broke the protocol", instance=self.record.instance_id, why=str(failure))
        stream.fail(failure)
        self.close(stream)

    # Loss

    def check(self, now: float) -> None:
        """Take the worker for lost if it is silent, or its engine stands still, for too long. Called every sweep."""
        limit_s = self._config.stall_s if self._streams else self._config.idle_stall_s
        if now - self._heard_at > limit_s:
            self.lose(Failure(Reason.STALLED, f"nothing heard from {self.record.address} for {limit_s} s"))
        elif self._streams and self._is_engine_due() and now - self._stepped_at > self._config.engine_stall_s:
            self.lose(Failure(Reason.STALLED, f"the engine of {self.record.address} stands still"))

    def _is_engine_due(self) -> bool:
        return self.load.running > 0 and not any(rank.active_prefill_tokens for rank in self.load.ranks)

    def forgive(self, now: float) -> None:
        """The frontend itself was late: silence until now proves nothing."""
        self._heard_at = self._stepped_at = now

    def lose(self, failure: Failure) -> None:
        """The session is over: every stream on it fails at once. Idempotent."""
        if self._lost.done():
            return
        self._lost.set_exception(failure)
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(failure)
