"""`Inference.Generate` over gRPC, alike on a frontend and on a worker: any pipeline, one handler.

The handler is a coroutine that calls `context.write`, not a generator: on hang-up it is cancelled in its own frame, and
with it the pipeline. Tokens that come while a write is under way travel together in the next message.
"""

import asyncio
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import structlog
from grpc_status import rpc_status

from services.errors import Failure, Reason
from services.layers import Gate, bug_failure, root_cause
from services.request import Call, Cause, Delta, Finish, Layer, Request
from services.rpc import abort, status_of
from services.stubs import inference_pb2, inference_pb2_grpc
from services.validate import MIGRATION_LIMIT, checked_request_id, migration_limit_of
from services.wire import delta_to_wire, request_from_wire

log = structlog.get_logger()

CLIENT_BUFFER_TOKENS_MAX = 65_536
"""What a client may leave unread before its request is ended with SLOW_CLIENT."""
CLIENT_DRAIN_S_MAX = 30.0
"""How long a client may take to accept what is unsent when its answer has ended."""

_MARKER = inference_pb2.GenerateResponse(complete_final=True)
Context = grpc.aio.ServicerContext[Any, Any]


def request_id_of(given: str) -> str:
    """The client's own name for the request, or a new one. Raises INVALID_ARGUMENT for one that can't be logged."""
    return checked_request_id(given) if given else uuid.uuid4().hex


class _Joined:
    """What has come of one choice since the last write."""

    __slots__ = ("choice", "finish_reason", "logprobs", "position", "texts", "token_ids", "usage")

    def __init__(self, first: Delta) -> None:
        self.choice = first.choice
        self.position = first.position
        self.token_ids = list(first.token_ids)
        self.texts = [first.text]
        self.logprobs = None if first.logprobs is None else list(first.logprobs)
        self.finish_reason, self.usage = first.finish_reason, first.usage

    def add(self, delta: Delta) -> None:
        """Add what comes next."""
        assert delta.position == self.position + len(self.token_ids), "a gap between deltas"
        self.token_ids.extend(delta.token_ids)
        self.texts.append(delta.text)
        if delta.logprobs:
            assert self.logprobs is not None, "all deltas with tokens have log probabilities, or none"
            self.logprobs.extend(delta.logprobs)
        self.finish_reason, self.usage = delta.finish_reason, delta.usage

    def delta(self) -> Delta:
        """All of it as one."""
        text = "".join(self.texts)
        return Delta(self.position, self.token_ids, text, self.choice, self.logprobs, self.finish_reason, self.usage)


class JoiningSink:
    """Holds what has come since the last write, one delta for each choice.

    Calls `on_first` with itself when something comes for the first time, and `on_overflow` once it is too much.
    """

    def __init__(self, on_first: Callable[["JoiningSink"], None], on_overflow: Callable[[], None]) -> None:
        self._on_first = on_first
        self._has_begun = False
        self._on_overflow = on_overflow
        self._joined: dict[int, _Joined] = {}
        self._token_count = 0
        self._is_closed = False
        self._changed = asyncio.Event()
        self._is_over = False

    def deliver(self, delta: Delta) -> None:
        joined = self._joined.get(delta.choice)
        if joined is None:
            self._joined[delta.choice] = _Joined(delta)
        else:
            joined.add(delta)
        self._token_count += delta.weight
        self._changed.set()
        if not self._has_begun:
            self._has_begun = True
            self._on_first(self)
        if self._token_count > CLIENT_BUFFER_TOKENS_MAX and not self._is_over:
            self._is_over = True
            self._on_overflow()

    def close(self) -> None:
        """Nothing more comes."""
        self._is_closed = True
        self._changed.set()

    async def take(self) -> Sequence[Delta]:
        """What has come, once something has; nothing after the last."""
        while not self._joined and not self._is_closed:
            self._changed.clear()
            await self._changed.wait()
        deltas = [joined.delta() for joined in self._joined.values()]
        self._joined, self._token_count = {}, 0
        return deltas


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Serves a pipeline."""

    def __init__(
        self, pipeline: Layer, gate: Gate, on_refused: Callable[[str, Failure], None] = lambda *_: None
    ) -> None:
        """gate: the pipeline's own. on_refused: told of requests that are too broken for the pipeline."""
        self._pipeline = pipeline
        self._gate = gate
        self._on_refused = on_refused

    async def Cancel(  # noqa: N802
        self, request: inference_pb2.CancelRequest, context: Context
    ) -> inference_pb2.CancelResponse:
        """See inference.proto."""
        try:
            cancelled = self._gate.cancel(checked_request_id(request.request_id))
        except Failure as failure:
            await abort(context, failure)
        return inference_pb2.CancelResponse(cancelled=cancelled)

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        """See inference.proto."""
        request_id = ""  # One that is refused is not echoed either: it may be of any size.
        try:
            request_id = request_id_of(request.request_id)
            limit = migration_limit_of(_metadata(context).get(MIGRATION_LIMIT.lower()))
            asked = request_from_wire(request)
        except Failure as failure:
            self._on_refused("generate", failure)
            _end(context, failure, request_id)
            return
        left_s = context.time_remaining()
        deadline = None if left_s is None else asyncio.get_running_loop().time() + left_s
        call = Call(request_id=request_id, deadline=deadline, migration_limit=limit)
        ending = await self._attempt(asked, call, context)
        if ending is not None:
            ending.forget_way()
            _end(context, ending, request_id)

    async def _attempt(self, request: Request, call: Call, context: Context) -> Failure | None:
        """Serve the request. Returns what it failed with."""
        try:
            await self._serve(request, call, context)
        except Failure as failure:
            return failure
        except Exception as error:
            return bug_failure(error, call.request_id)
        return None

    async def _serve(self, request: Request, call: Call, context: Context) -> None:
        """The whole answer. Raises SLOW_CLIENT if its client does not take the end of it in time."""
        draining = asyncio.timeout(None)
        try:
            async with draining:
                await self._stream(request, call, context, draining)
        except TimeoutError:
            if not draining.expired():
                raise
            log.warning("client cut", reason=Reason.SLOW_CLIENT, request_id=call.request_id)
            detail = f"the client did not take the end of the answer within {CLIENT_DRAIN_S_MAX:g} s"
            raise Failure(Reason.SLOW_CLIENT, detail) from None

    async def _stream(self, request: Request, call: Call, context: Context, draining: asyncio.Timeout) -> None:
        # A client that does not read holds up the writer, so it is the sink that has the request ended.
        def start(sink: JoiningSink) -> None:
            writing.append(group.create_task(_write_deltas(sink, context)))

        def cut() -> None:
            failure = Failure(Reason.SLOW_CLIENT, f"the client left {CLIENT_BUFFER_TOKENS_MAX} tokens unread")
            call.ending.fail(failure, Cause.SLOW_CLIENT)

        writing: list[asyncio.Task[None]] = []
        sink = JoiningSink(start, cut)
        try:
            async with asyncio.TaskGroup() as group:
                outcome = await self._outcome(request, call, sink)
                draining.reschedule(asyncio.get_running_loop().time() + CLIENT_DRAIN_S_MAX)
                sink.close()
                for task in writing:  # Not left to the group: one that fails while it ends leaves its owner cancelled.
                    await task
        except ExceptionGroup as failures:
            raise root_cause(failures) from None
        if isinstance(outcome, Failure):
            raise outcome
        await context.write(_MARKER)

    async def _outcome(self, request: Request, call: Call, sink: JoiningSink) -> Finish | Failure:
        """A failure is returned, so that what was delivered before it is written first."""
        try:
            return await self._pipeline(request, call, sink)
        except Failure as failure:
            return failure


def _metadata(context: Context) -> dict[str, str]:
    """What the client sent beside the request; gRPC's keys are in lower case."""
    pairs = context.invocation_metadata() or ()
    return {key: value for key, value in pairs if isinstance(value, str)}


async def _write_deltas(sink: JoiningSink, context: Context) -> None:
    # By itself: as part of a message that its client does not take it would stand in the way of the status.
    await context.send_initial_metadata(())
    deltas = await sink.take()
    while deltas:
        for delta in deltas:
            await context.write(delta_to_wire(delta))
        deltas = await sink.take()


def _end(context: Context, failure: Failure, request_id: str) -> None:
    """Have the rpc end with the failure when its handler returns.

    Behind a message that its client does not take the status waits too: gRPC sends it to a client that reads on after
    all, and forgets it with the connection.
    """
    status = rpc_status.to_status(status_of(failure, request_id=request_id))
    context.set_code(status.code)
    context.set_details(status.details)
    context.set_trailing_metadata(status.trailing_metadata)
