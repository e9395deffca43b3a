"""Writes one answer to a gRPC client, which may read as slowly as the bounds allow.

A message is sent in the call that brings its tokens. While a client is slow, a task writes, and tokens that arrive
during a write travel together in the next message.
"""

import asyncio
from collections.abc import Callable

import structlog

from services.core.call import Call, Cause
from services.core.common_layers import outcome_of
from services.core.errors import Failure, Reason
from services.core.flow.client_flow import ClientBounds, StallWatch
from services.core.flow.delta_buffer import DeltaBuffer
from services.core.generation.replay import ReplayRoom
from services.core.generation.wish import GENERATION_ID
from services.core.interface import Delta, Layer
from services.core.request import Request
from services.rpc.codec import delta_to_wire
from services.rpc.common_message import common_message
from services.rpc.context import Context
from services.rpc.kept_items import KeptItems
from services.runtime.tasks import root_cause
from services.stubs import inference_pb2

log = structlog.get_logger()

_MARKER = inference_pb2.GenerateResponse(complete_final=True)


class StreamWriter:
    """The sink of one answer, and the writer of its messages.

    A client that does not read blocks the writer, so the sink or the stall watch ends the request.

    | the client | what happens |
    | --- | --- |
    | leaves more than `buffer_bytes_max` unread | the request ends; the client may read the buffer for `drain_s` |
    | reads nothing for `stall_s_max` | the request ends, and nothing more is written |
    | leaves `connection_bytes_max` unread on all its streams, and most on this one | the same |
    | does not read the end within `drain_s` | nothing more is written |

    Unread bytes are those in the buffer, without the message being written (at most `PIECE_BYTES_MAX`) and the buffers
    of the server. What comes from workers' records does not count: see `ReplayRoom`.
    """

    __slots__ = (
        "__weakref__",
        "_bounds",
        "_buffer",
        "_call",
        "_changed",
        "_context",
        "_drain_s",
        "_draining",
        "_given_up",
        "_group",
        "_has_head",
        "_has_message",
        "_is_closed",
        "_is_writing",
        "_items",
        "_room",
        "_send_on",
        "_watch",
        "_writing",
    )

    def __init__(self, call: Call, context: Context, bounds: ClientBounds) -> None:
        self._call = call
        self._has_head = self._has_message = False
        self._send_on: Callable[[bytes], None] | None = None  # Set while messages go straight to the client.
        self._context = context
        self._bounds = bounds
        self._buffer = DeltaBuffer(context.hold)
        self._changed: asyncio.Event | None = None  # Made when the writer first waits: most streams have none.
        self._is_closed = False
        self._is_writing = False
        self._writing: asyncio.Task[None] | None = None
        self._group = asyncio.TaskGroup()
        self._draining = asyncio.timeout(None)
        self._drain_s = bounds.drain_s_max
        self._given_up = ""  # Why, if nothing more is written.
        self._watch: StallWatch | None = None
        self._items: KeptItems | None = None
        self._room: ReplayRoom | None = None

    def deliver(self, delta: Delta) -> None:
        if self._send_on is not None and (encoded := common_message(delta)) is not None:
            self._send_on(encoded)  # The path of every token of a client that keeps up.
        elif self._items is None:
            self._add(delta)
        else:
            self._add_new(self._items, delta)

    def _add_new(self, items: KeptItems, delta: Delta) -> None:
        """Add what the client does not have."""
        try:
            for new in items.new(delta):
                self._add(new)
        except Failure as failure:
            self._call.ending.fail(failure, Cause.RESUME_REFUSED)

    def _add(self, delta: Delta) -> None:
        context = self._context
        if context.has_room and not self._buffer and not self._is_writing:
            if not self._has_head:
                context.send_head(self._head())
            context.send(self._message(delta))
            if self._items is None and context.has_room:
                self._send_on = context.sender(self._on_full)
            return
        added = self._buffer.add(delta)
        if self._room is not None:
            self._room.add(delta, added)
        self._wake()
        if self._writing is None:
            self._begin()
        if self._buffer.size > self._bounds.buffer_bytes_max and self._call.ending.failure is None:
            self._on_much_unread()

    def _on_full(self) -> None:
        """The client is slow: what follows waits in the buffer."""
        self._send_on = None

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()

    def _on_much_unread(self) -> None:
        bytes_max = self._bounds.buffer_bytes_max + (0 if self._room is None else self._room.size)
        if self._buffer.size > bytes_max:
            self._end(f"the client left more than {bytes_max} bytes unread")

    async def run(self, pipeline: Layer, request: Request) -> None:
        """Run the request and write its answer. Raises the failure of the pipeline, and SLOW_CLIENT."""
        if (kept := self._call.kept) is not None:
            self._items = KeptItems(kept, request)
            if kept.generation.is_resumed:
                self._room = ReplayRoom(kept.generation.record_ends)
            if kept.cursor is None:  # With one, the answer may still be refused.
                kept.generation.on_begun = self._begin_early
        self._context.on_evicted = self._give_up
        try:
            async with self._draining:
                await self._run(pipeline, request)
        except TimeoutError:
            if not self._draining.expired():
                raise
            log.warning("client cut", reason=Reason.SLOW_CLIENT, request_id=self._call.request_id)
            raise Failure(Reason.SLOW_CLIENT, self._slow_detail()) from None
        finally:
            if self._watch is not None:
                self._watch.stop()
                self._watch = None  # Break the cycle: it need not wait for the garbage collector.
            if kept is not None:
                kept.generation.on_begun = None  # Likewise.
            self._context.on_evicted = None

    async def _run(self, pipeline: Layer, request: Request) -> None:
        try:
            async with self._group:
                outcome = await outcome_of(pipeline, request, self._call, self)
                if self._writing is not None or not isinstance(outcome, Failure):  # A refusal needs no timer.
                    self._close()
                if self._writing is not None:
                    # Await it here: a group with a task that fails during its exit leaves its owner cancelled.
                    await self._writing
        except ExceptionGroup as failures:
            raise root_cause(failures) from None
        if isinstance(outcome, Failure):
            raise outcome
        await self._write(_MARKER)

    def _begin(self) -> None:
        """Start to write what is buffered: a client that keeps up needs no second task and no timer."""
        self._writing = self._group.create_task(self._write_all())
        self._watch = StallWatch(self._bounds.stall_s_max, self._progress, self._on_stall)
        self._watch.start()

    def _begin_early(self) -> None:
        """The engine has begun: tell the client by which id it can come back."""
        if not self._has_head:
            self._context.send_head(self._head())

    def _close(self) -> None:
        """No more tokens come. The client has a bounded time to read the rest, or no time if it is given up."""
        self._is_closed = True
        self._wake()
        self._drain_s = 0.0 if self._given_up else self._bounds.drain_s(self._buffer.size)
        self._draining.reschedule(asyncio.get_running_loop().time() + self._drain_s)

    async def _write_all(self) -> None:
        while (delta := await self._next_delta()) is not None:
            await self._write(self._message(delta))

    def _head(self) -> tuple[tuple[str, str], ...]:
        """The initial metadata, which are sent now: the id of a kept answer."""
        self._has_head = True
        if (kept := self._call.kept) is None:
            return ()
        kept.generation.is_told = True  # Before it is sent.
        return ((GENERATION_ID.lower(), kept.generation.name),)

    def _message(self, delta: Delta) -> inference_pb2.GenerateResponse:
        """The next message. The first one has the seed, and the id of a kept answer."""
        cursor = "" if self._items is None else self._items.cursor_after(delta)
        if self._has_message:
            return delta_to_wire(delta, None, "", cursor)
        self._has_message = True
        kept = self._call.kept
        return delta_to_wire(delta, self._call.told.seed, "" if kept is None else kept.generation.name, cursor)

    async def _next_delta(self) -> Delta | None:
        """Wait for tokens and return them; None after the last."""
        while not self._buffer and not self._is_closed:
            if self._changed is None:
                self._changed = asyncio.Event()
            self._changed.clear()
            await self._changed.wait()
        return self._buffer.pop() if self._buffer else None

    async def _write(self, message: inference_pb2.GenerateResponse) -> None:
        self._is_writing = True
        await self._context.write(message)
        self._is_writing = False

    def _progress(self) -> int | None:
        """A number that changes when the client reads; None while it is not waited for."""
        return self._context.progress() if self._is_writing else None

    def _on_stall(self) -> None:
        self._give_up(f"the client has read nothing for {self._bounds.stall_s_max:g} s")

    def _give_up(self, why: str) -> None:
        """Write nothing more, and end the request."""
        self._given_up = why
        self._end(why)
        if self._is_closed:
            self._draining.reschedule(asyncio.get_running_loop().time())

    def _slow_detail(self) -> str:
        return self._given_up or f"the client did not read the end of the answer within {self._drain_s:g} s"

    def _end(self, why: str) -> None:
        self._call.ending.fail(Failure(Reason.SLOW_CLIENT, why), Cause.SLOW_CLIENT)
