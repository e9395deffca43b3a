"""`Worker.Attach`: all requests of one frontend on one stream.

Every request is one call of the worker's pipeline in a task of its own; its tokens go to the session's outbox, which
the writer empties into one message as often as the frontend can take one. When the session ends, its task group ends,
and with it every request.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import structlog

from services.errors import Failure
from services.generate import request_id_of
from services.request import Attempt, Call, Delta, Finish, Layer, TokenLogprobs
from services.stubs import worker_pb2
from services.undecodable import read
from services.wire import (
    error_to_wire,
    finish_reason_to_wire,
    logprobs_to_wire,
    request_from_wire,
    seconds_from_wire,
    seconds_to_wire,
)

log = structlog.get_logger()

TOKEN_BYTES = 4
"""What a token id is long; an end counts as so many tokens as it has bytes for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    """heartbeat_s: longest silence while the session has streams; idle_heartbeats: as a multiple of it, otherwise.

    outbox_tokens_max: what a frontend may leave unread before its session is dropped; an end counts by its length.
    """

    heartbeat_s: float = 0.25
    idle_heartbeats: int = 8
    outbox_tokens_max: int = 262_144
    migration_limit: int | None = None


class SessionOverError(Exception):
    """Ends a session's task group; the message says why."""


class Outbox:
    """What is to be sent to one frontend: each stream's tokens in one entry, then ends.

    A frontend that is slow gets fewer and larger entries. `is_over` is set over the bound in tokens.
    """

    def __init__(self, tokens_max: int) -> None:
        self._tokens_max = tokens_max
        self._changed = asyncio.Event()
        self._message = worker_pb2.AttachResponse()
        self._entries: dict[int, tuple[int, list[int]]] = {}  # stream id → position, tokens
        self._logprobs: dict[int, list[TokenLogprobs]] = {}  # stream id → of those tokens, where asked
        self._token_count = 0
        self.is_over = asyncio.Event()

    def add_tokens(self, stream_id: int, delta: Delta) -> None:
        entry = self._entries.get(stream_id)
        if entry is None:
            self._entries[stream_id] = (delta.position, list(delta.token_ids))
        else:
            assert delta.position == entry[0] + len(entry[1]), "a gap between deltas"
            entry[1].extend(delta.token_ids)
        if delta.logprobs is not None:
            self._logprobs.setdefault(stream_id, []).extend(delta.logprobs)
        self._grow(delta.weight)

    def add_end(self, end: worker_pb2.StreamEnd) -> None:
        self._message.ends.append(end)
        self._grow(-(-end.ByteSize() // TOKEN_BYTES))

    def _grow(self, token_count: int) -> None:
        self._token_count += token_count
        self._changed.set()
        if self._token_count > self._tokens_max:
            self.is_over.set()

    def add_begun(self, stream_id: int) -> None:
        self._message.begun.append(stream_id)
        self._changed.set()

    def set_welcome(self, welcome: worker_pb2.Welcome) -> None:
        self._message.welcome.CopyFrom(welcome)
        self._changed.set()

    def set_load(self, load: worker_pb2.Load) -> None:
        self._message.load.CopyFrom(load)
        self._changed.set()

    def set_goaway(self, grace_s: float) -> None:
        self._message.goaway.grace.CopyFrom(seconds_to_wire(grace_s))
        self._changed.set()

    def wake(self) -> None:
        """Let the next message be taken though there is nothing to say."""
        self._changed.set()

    @property
    def is_empty(self) -> bool:
        return not self._entries and not self._message.ByteSize()

    async def take(self) -> worker_pb2.AttachResponse:
        """The next message, once there is something to send."""
        await self._changed.wait()
        self._changed.clear()
        message, self._message = self._message, worker_pb2.AttachResponse()
        self._token_count = 0
        if self._entries:
            entries, self._entries = self._entries, {}
            step = message.step
            step.stream_ids.extend(entries)
            step.positions.extend([position for position, _ in entries.values()])
            step.token_counts.extend([len(token_ids) for _, token_ids in entries.values()])
            step.token_ids.extend([token for _, token_ids in entries.values() for token in token_ids])
            if self._logprobs:
                self._add_logprobs(step)
        return message

    def _add_logprobs(self, step: worker_pb2.Step) -> None:
        taken, self._logprobs = self._logprobs, {}
        for index, stream_id in enumerate(step.stream_ids):
            if (logprobs := taken.get(stream_id)) is not None:
                step.logprobs.add(entry=index, tokens=map(logprobs_to_wire, logprobs))


class _StreamSink:
    """One request's tokens, to the session's outbox."""

    def __init__(self, outbox: Outbox, stream_id: int) -> None:
        self._outbox = outbox
        self._stream_id = stream_id

    def deliver(self, delta: Delta) -> None:
        self._outbox.add_tokens(self._stream_id, delta)


class Session:
    """The worker's end of one session."""

    def __init__(
        self,
        pipeline: Layer,
        welcome: worker_pb2.Welcome,
        load: Callable[[], worker_pb2.Load],
        config: SessionConfig,
    ) -> None:
        self._pipeline = pipeline
        self._load = load
        self._config = config
        self._outbox = Outbox(config.outbox_tokens_max)
        self._outbox.set_welcome(welcome)
        self._outbox.set_load(load())
        self._requests: dict[int, asyncio.Task[None]] = {}
        self._is_leaving = False
        self._has_ended = False

    def goaway(self, grace_s: float) -> None:
        """Tell the frontend that the worker leaves."""
        self._is_leaving = True
        self._outbox.set_goaway(grace_s)

    def end(self) -> None:
        """End the session in order, with what is still unsent sent."""
        self._has_ended = True
        self._outbox.wake()

    async def serve(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Until the frontend hangs up or the session has to be dropped. Leaves no request behind."""
        # By itself: a first write that is cancelled half-way leaves gRPC unable to end the call, and the peer waiting.
        await context.send_initial_metadata(())
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._write(context))
                group.create_task(self._beat())
                group.create_task(self._watch_bound())
                await self._read(context, group)
        except* SessionOverError as over:
            log.info("session over", why=str(over.exceptions[0]), peer=context.peer())

    async def _read(self, context: grpc.aio.ServicerContext[Any, Any], group: asyncio.TaskGroup) -> None:
        while (message := await _next(context)) is not grpc.aio.EOF:
            for submit in message.submits:
                self._submit(submit, group)
            for stream_id in message.cancels:
                if (task := self._requests.get(stream_id)) is not None:
                    task.cancel()
        raise SessionOverError("this worker leaves" if self._is_leaving else "the frontend ended it, or is gone")

    def _submit(self, submit: worker_pb2.Submit, group: asyncio.TaskGroup) -> None:
        if submit.stream_id in self._requests:
            raise SessionOverError(f"the frontend used stream id {submit.stream_id} twice")
        task = group.create_task(self._run(submit))
        self._requests[submit.stream_id] = task
        task.add_done_callback(lambda _: self._requests.pop(submit.stream_id))

    async def _run(self, submit: worker_pb2.Submit) -> None:
        deadline = None
        if submit.HasField("timeout"):
            deadline = asyncio.get_running_loop().time() + seconds_from_wire(submit.timeout)
        end = worker_pb2.StreamEnd(stream_id=submit.stream_id)
        try:
            attempt = Attempt(on_begun=lambda: self._outbox.add_begun(submit.stream_id))
            call = Call(request_id=request_id_of(submit.request.request_id), deadline=deadline, attempt=attempt)
            sink = _StreamSink(self._outbox, submit.stream_id)
            finish: Finish = await self._pipeline(request_from_wire(submit.request), call, sink)
            end.finish_reason, end.complete_final = finish_reason_to_wire(finish.reason), True
        except Failure as failure:
            end.error.CopyFrom(error_to_wire(failure))
        self._outbox.add_end(end)

    async def _write(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        while not (self._has_ended and self._outbox.is_empty):
            await context.write(await self._outbox.take())
        raise SessionOverError("this worker left")

    async def _watch_bound(self) -> None:
        """Not the writer's business: a frontend that reads nothing holds up the writer for ever."""
        await self._outbox.is_over.wait()
        raise SessionOverError(f"the frontend left more than {self._config.outbox_tokens_max} tokens unread")

    async def _beat(self) -> None:
        """The load, every heartbeat while there are streams, seldom otherwise."""
        beats = 0
        while True:
            await asyncio.sleep(self._config.heartbeat_s)
            beats += 1
            if self._requests or beats % self._config.idle_heartbeats == 0:
                self._outbox.set_load(self._load())


async def _next(context: grpc.aio.ServicerContext[Any, Any]) -> Any:
    """The frontend's next message. Ends the session over one that is no message."""
    try:
        return await read(context)
    except Failure as failure:
        raise SessionOverError(f"the frontend broke the protocol: {failure.detail}") from None
