"""`Inference.Generate` over gRPC, alike on a frontend and on a worker: any pipeline, one handler.

The handler is a coroutine that calls `context.write`, not a generator: on hang-up it is cancelled in its own frame, and
with it the pipeline. Tokens that come while a write is under way travel together in the next message.
"""

import asyncio
import re
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from services.errors import Failure, Reason, invalid
from services.layers import bug_failure, root_cause
from services.request import Call, Delta, Finish, Layer, Request
from services.rpc import abort
from services.stubs import inference_pb2, inference_pb2_grpc
from services.wire import delta_to_wire, request_from_wire

CLIENT_BUFFER_TOKENS_MAX = 65_536
"""What a client may leave unread before its request is ended with SLOW_CLIENT."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_MARKER = inference_pb2.GenerateResponse(complete_final=True)
Context = grpc.aio.ServicerContext[Any, Any]


def request_id_of(given: str) -> str:
    """The client's own name for the request, or a new one. Raises INVALID_ARGUMENT for one that can't be logged."""
    if not given:
        return uuid.uuid4().hex
    if not _REQUEST_ID.fullmatch(given):
        raise invalid("request_id", "request_id must be 1 to 128 letters, digits, '-', '_', '.' or ':'")
    return given


class JoiningSink:
    """Holds what has come since the last write, one delta for each choice; calls `on_overflow` once it is too much."""

    def __init__(self, on_overflow: Callable[[], None]) -> None:
        self._on_overflow = on_overflow
        self._joined: dict[int, Delta] = {}
        self._token_count = 0
        self._is_closed = False
        self._changed = asyncio.Event()
        self.is_over = False

    def deliver(self, delta: Delta) -> None:
        joined = self._joined.get(delta.choice)
        if joined is None:
            self._joined[delta.choice] = Delta(
                delta.position,
                list(delta.token_ids),
                delta.text,
                delta.choice,
                None if delta.logprobs is None else list(delta.logprobs),
                delta.finish_reason,
                delta.usage,
            )
        else:
            _join(joined, delta)
        self._token_count += len(delta.token_ids)
        self._changed.set()
        if self._token_count > CLIENT_BUFFER_TOKENS_MAX and not self.is_over:
            self.is_over = True
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
        deltas, self._joined, self._token_count = list(self._joined.values()), {}, 0
        return deltas


def _join(joined: Delta, delta: Delta) -> None:
    """Add `delta` to what stands before it; `joined` owns its lists."""
    assert delta.position == joined.position + len(joined.token_ids), "a gap between deltas"
    assert isinstance(joined.token_ids, list)
    joined.token_ids.extend(delta.token_ids)
    joined.text += delta.text
    if delta.logprobs:
        assert isinstance(joined.logprobs, list)
        joined.logprobs.extend(delta.logprobs)
    joined.finish_reason, joined.usage = delta.finish_reason, delta.usage


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Serves a pipeline."""

    def __init__(self, pipeline: Layer, on_refused: Callable[[str, Failure], None] = lambda *_: None) -> None:
        """on_refused: told of requests that are too broken for the pipeline."""
        self._pipeline = pipeline
        self._on_refused = on_refused

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        """See inference.proto."""
        request_id = ""  # One that is refused is not echoed either: it may be of any size.
        try:
            request_id = request_id_of(request.request_id)
            asked = request_from_wire(request)
        except Failure as failure:
            self._on_refused("generate", failure)
            await abort(context, failure, request_id=request_id)
        left_s = context.time_remaining()
        deadline = None if left_s is None else asyncio.get_running_loop().time() + left_s
        try:
            await self._stream(asked, Call(request_id=request_id, deadline=deadline), context)
        except Failure as failure:
            await abort(context, failure, request_id=request_id)
        except Exception as error:
            await abort(context, bug_failure(error, request_id), request_id=request_id)

    async def _stream(self, request: Request, call: Call, context: Context) -> None:
        clock, scope = asyncio.get_running_loop().time, asyncio.timeout(None)
        # A client that does not read holds up the writer, so it is the sink that ends the request: it ends its time.
        sink = JoiningSink(on_overflow=lambda: scope.reschedule(clock()))
        try:
            async with asyncio.TaskGroup() as group:
                writing = group.create_task(_write_deltas(sink, context))
                outcome = await self._run(request, call, sink, scope)
                sink.close()
                await writing  # Not left to the group: one that fails while it ends leaves its owner cancelled.
        except ExceptionGroup as group:
            raise root_cause(group) from None
        if isinstance(outcome, Failure):
            raise outcome
        await context.write(_MARKER)

    async def _run(self, request: Request, call: Call, sink: JoiningSink, scope: asyncio.Timeout) -> Finish | Failure:
        """A failure is returned, so that what was delivered before it is written first."""
        try:
            async with scope:
                return await self._pipeline(request, call, sink)
        except Failure as failure:
            return failure
        except TimeoutError:
            if not sink.is_over:
                raise
            return Failure(Reason.SLOW_CLIENT, f"the client left {CLIENT_BUFFER_TOKENS_MAX} tokens unread")


async def _write_deltas(sink: JoiningSink, context: Context) -> None:
    while deltas := await sink.take():
        for delta in deltas:
            await context.write(delta_to_wire(delta))
