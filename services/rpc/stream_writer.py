"""One answer on its way to a gRPC client, who may read as slowly as the bounds allow.

Tokens that come while a write is under way travel together in the next message.
"""

import asyncio
from typing import Any

import grpc
import structlog

from services.core.call import Call, Cause
from services.core.client_flow import ClientBounds, StallWatch
from services.core.common_layers import outcome_of
from services.core.delta_buffer import DeltaBuffer
from services.core.errors import Failure, Reason
from services.core.interface import Delta, Layer
from services.core.request import Request
from services.rpc.codec import delta_to_wire
from services.runtime.tasks import root_cause
from services.stubs import inference_pb2

log = structlog.get_logger()

_MARKER = inference_pb2.GenerateResponse(complete_final=True)
Context = grpc.aio.ServicerContext[Any, Any]


class StreamWriter:
    """The sink of one answer, and the writer of its messages.

    A client that does not read holds up the writer, so it is the sink, or the watch, that has the request ended.

    | the client | what happens |
    | --- | --- |
    | leaves more than `buffer_bytes_max` unread | the request ends; what has come may still be read for `drain_s_max` |
    | takes no message for `stall_s_max` | the request ends, and nothing more is written |
    | does not take the end within `drain_s_max` | nothing more is written |

    Unread is what is held here: not the one message under way, of `PIECE_BYTES_MAX`, nor what gRPC itself buffers.
    """

    def __init__(self, call: Call, context: Context, bounds: ClientBounds) -> None:
        self._call = call
        self._context = context
        self._bounds = bounds
        self._held = DeltaBuffer()
        self._changed = asyncio.Event()
        self._is_closed = False
        self._is_writing = False
        self._writing: asyncio.Task[None] | None = None
        self._group = asyncio.TaskGroup()
        self._written_count = 0
        self._draining = asyncio.timeout(None)
        self._watch: StallWatch | None = None

    def deliver(self, delta: Delta) -> None:
        self._held.add(delta)
        self._changed.set()
        if self._writing is None:
            self._begin()
        if self._held.size > self._bounds.buffer_bytes_max and self._call.ending.failure is None:
            self._end(f"the client left more than {self._bounds.buffer_bytes_max} bytes unread")

    async def run(self, pipeline: Layer, request: Request) -> None:
        """The whole answer. Raises the pipeline's failure, and SLOW_CLIENT."""
        try:
            async with self._draining:
                await self._run(pipeline, request)
        except TimeoutError:
            if not self._draining.expired():
                raise
            log.warning("client cut", reason=Reason.SLOW_CLIENT, request_id=self._call.request_id)
            raise Failure(Reason.SLOW_CLIENT, self._why_cut()) from None
        finally:
            if self._watch is not None:
                self._watch.stop()
                self._watch = None  # Each has the other, and nothing is to be left to the garbage collector.

    async def _run(self, pipeline: Layer, request: Request) -> None:
        try:
            async with self._group:
                outcome = await outcome_of(pipeline, request, self._call, self)
                self._close()
                if self._writing is not None:
                    # Not left to the group: one that fails while it ends leaves its owner cancelled.
                    await self._writing
        except ExceptionGroup as failures:
            raise root_cause(failures) from None
        if isinstance(outcome, Failure):
            raise outcome
        await self._write(_MARKER)

    def _begin(self) -> None:
        """Not before there is something to write: what is refused before needs no second task, and no timer."""
        self._writing = self._group.create_task(self._write_all())
        self._watch = StallWatch(self._bounds.stall_s_max, self._taken_count, self._on_stall)
        self._watch.start()

    @property
    def _has_stalled(self) -> bool:
        return self._watch is not None and self._watch.has_stalled

    def _close(self) -> None:
        """Nothing more comes: from now on the time for the end runs, of which one that has stalled gets none."""
        self._is_closed = True
        self._changed.set()
        left_s = 0.0 if self._has_stalled else self._bounds.drain_s_max
        self._draining.reschedule(asyncio.get_running_loop().time() + left_s)

    async def _write_all(self) -> None:
        # By itself: as part of a message that its client does not take it would stand in the way of the status.
        await self._context.send_initial_metadata(())
        delta = await self._take()
        while delta is not None:
            await self._write(delta_to_wire(delta))
            delta = await self._take()

    async def _take(self) -> Delta | None:
        """The next of what has come, once something has; None after the last."""
        while not self._held and not self._is_closed:
            self._changed.clear()
            await self._changed.wait()
        return self._held.pop() if self._held else None

    async def _write(self, message: inference_pb2.GenerateResponse) -> None:
        self._is_writing = True
        await self._context.write(message)
        self._is_writing = False
        self._written_count += 1

    def _taken_count(self) -> int | None:
        """Of messages; None: none is under way."""
        return self._written_count if self._is_writing else None

    def _on_stall(self) -> None:
        self._end(self._why_cut())
        if self._is_closed:
            self._draining.reschedule(asyncio.get_running_loop().time())

    def _why_cut(self) -> str:
        if self._has_stalled:
            return f"the client has taken nothing for {self._bounds.stall_s_max:g} s"
        return f"the client did not take the end of the answer within {self._bounds.drain_s_max:g} s"

    def _end(self, why: str) -> None:
        self._call.ending.fail(Failure(Reason.SLOW_CLIENT, why), Cause.SLOW_CLIENT)
