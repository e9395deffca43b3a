"""One rpc: its request, the handler that answers it, and the context that the handler sees.

The context has the methods of grpc.aio's, so handlers and generated code need not know which server serves them.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, NoReturn, Protocol

import grpc
from google.protobuf.message import DecodeError
from grpc import StatusCode

from services.core.client_flow import ClientBounds
from services.core.common_layers import bug_failure
from services.http.grpc.messages import COMPRESSED_BYTES_MIN, GZIP, Decompressor, MessageReader, compressed
from services.http.grpc.metadata import (
    Metadata,
    RpcError,
    head_block,
    metadata_in,
    timeout_s_in,
    trailers_block,
)
from services.http.h2.request import Host, Request
from services.http.h2.stream import Stream
from services.http.h2.wire.fields import RequestHead
from services.http.h2.wire.frames import ErrorCode
from services.http.server.exchange import taken_within
from services.runtime.loop import clock

DEADLINE_LATE_S = 0.1
"""How long after its deadline a handler is cancelled. One that watches the deadline itself has a better answer."""
UNDECODABLE = "the request cannot be decoded: send a message of the type that the .proto file names"
_IDENTITY = "identity"
HEALTH_CHECK = "/grpc.health.v1.Health/Check"


class Method:
    """A method of a service, from what generated code registers."""

    __slots__ = ("behaviour", "decode", "encode", "is_request_streamed", "is_response_streamed")

    def __init__(self, handler: "grpc.RpcMethodHandler[Any, Any]") -> None:
        one: Any = handler
        self.is_request_streamed: bool = one.request_streaming
        self.is_response_streamed: bool = one.response_streaming
        self.behaviour: Callable[..., Any] = (
            one.unary_unary or one.unary_stream or one.stream_unary or one.stream_stream
        )
        self.decode: Callable[[bytes], Any] = one.request_deserializer or bytes
        self.encode: Callable[[Any], bytes] = one.response_serializer or bytes


class Rpcs(Protocol):
    """What all rpcs of a server share."""

    bounds: ClientBounds
    decompressor: Decompressor
    guards: list[Callable[[str, Metadata], None]]


class Ended(Request):
    """What ends a stream of gRPC: trailers, or a head that has them as well."""

    __slots__ = ("_has_head",)

    def __init__(self, host: Host, stream: Stream) -> None:
        super().__init__(host, stream)
        self._has_head = False

    def end(self, code: StatusCode, message: str = "", trailing: Metadata = (), *, now: bool = False) -> None:
        """Send the status. `now`: before what waits, which is dropped."""
        block = trailers_block(code, message, trailing)
        if not self._has_head:
            self._has_head = True
            block = head_block(()) + block
        if now:
            self._stream.end_now(block)
        else:
            self._stream.end(trailers=block)

    def on_data(self, data: bytes) -> None:
        """It is not needed. The window stays closed."""

    def on_end(self) -> None:
        """The status was sent, or will be."""

    def on_late(self) -> None:
        """The request is not waited for."""


class RejectedRpc(Ended):
    """An rpc that is answered with a status at once."""

    __slots__ = ("_code", "_message")

    def __init__(self, host: Host, stream: Stream, code: StatusCode, message: str) -> None:
        super().__init__(host, stream)
        self._code = code
        self._message = message
        self.begin()

    async def answer(self) -> None:
        self.end(self._code, self._message)


class Rpc(Ended):
    """An rpc: its request, and the task of its handler.

    A handler with one request begins once that has come, one with a stream of requests at once. If the client cancels
    the rpc or disconnects, the handler is cancelled in its own frame.
    """

    __slots__ = (
        "_changed",
        "_compresses",
        "_fault",
        "_held_size",
        "_reader",
        "_request_has_ended",
        "_unused_size",
        "deadline",
        "encoding",
        "head",
        "metadata",
        "method",
        "rpcs",
    )

    def __init__(self, host: Host, stream: Stream, head: RequestHead, method: Method, rpcs: Rpcs) -> None:
        super().__init__(host, stream)
        self.head = head
        self.method = method
        self.rpcs = rpcs
        self.metadata: Metadata = ()
        self.deadline: float | None = None
        self.encoding = head.headers.get("grpc-encoding", _IDENTITY)
        self._reader = MessageReader()
        self._changed: asyncio.Event | None = None
        self._request_has_ended = False
        self._fault: RpcError | None = None
        self._held_size = self._unused_size = 0
        self._compresses = self.encoding == GZIP
        try:
            self._check(head)
        except RpcError as error:
            self._fault = error
        if method.is_request_streamed or self._fault is not None:
            self._begin()

    def _check(self, head: RequestHead) -> None:
        """Raises RpcError."""
        if (timeout_s := timeout_s_in(head.headers)) is not None:
            self.deadline = clock() + timeout_s
        self.metadata = metadata_in(head.headers)
        for guard in self.rpcs.guards:
            guard(head.path, self.metadata)
        if self.encoding not in (_IDENTITY, GZIP):
            raise RpcError(StatusCode.UNIMPLEMENTED, f"grpc-encoding {self.encoding[:50]} is not supported: use gzip")

    # Receiving

    def on_data(self, data: bytes) -> None:
        if self._fault is not None or (self._has_begun and not self.method.is_request_streamed):
            return  # The window stays closed.
        if not self.method.is_request_streamed and not self._hold(len(data)):
            return
        self._unused_size += len(data)
        try:
            self._reader.feed(data)
        except RpcError as error:
            self._set_fault(error)
            return
        if not self.method.is_request_streamed or not self._reader.messages:
            self._use()
        self._wake()

    def _hold(self, size: int) -> bool:
        """Count content that waits for the rest of the request. Returns False, and resets the stream, above the bound
        of all requests of the connection."""
        if self._host.bodies_size + size > self._host.context.app.body_bytes_max:
            self._stream.reset(ErrorCode.REFUSED_STREAM)
            return False
        self._host.bodies_size += size
        self._held_size += size
        return True

    def _use(self) -> None:
        """Let the client send on: what has come is used, or a part of a message that is bounded."""
        size, self._unused_size = self._unused_size, 0
        self._stream.use(size)

    def on_end(self) -> None:
        self._request_has_ended = True
        if self._fault is None:
            fault = self._fault_at_end()
            if fault is not None:
                self._set_fault(fault)
            elif not self._has_begun:
                self._begin()
        self._wake()

    def _begin(self) -> None:
        """Answer when it is the rpc's turn. A health check waits for none."""
        self.begin(at_once=self.head.path == HEALTH_CHECK)

    def _fault_at_end(self) -> RpcError | None:
        if self._reader.is_midway:
            return RpcError(StatusCode.INTERNAL, "the request ends within a message")
        if not self.method.is_request_streamed and len(self._reader.messages) != 1:
            return RpcError(StatusCode.INTERNAL, f"{len(self._reader.messages)} messages where one is expected")
        return None

    def on_late(self) -> None:
        within = f"within {self._host.context.config.body_read_s_max:g} s"
        self._set_fault(RpcError(StatusCode.DEADLINE_EXCEEDED, f"the request did not arrive {within}"))

    def _set_fault(self, error: RpcError) -> None:
        """End the rpc: with the next read if it has begun."""
        self._fault = error
        if not self._has_begun:
            self._begin()
        self._wake()

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()

    def on_reset(self) -> None:
        self._release()
        super().on_reset()

    def _release(self) -> None:
        self._host.bodies_size -= self._held_size
        self._held_size = 0

    async def read(self) -> Any:
        """The next message; None after the last. Raises RpcError."""
        while not self._reader.messages:
            if self._fault is not None:
                raise self._fault
            if self._request_has_ended:
                return None
            self._changed = asyncio.Event()
            await self._changed.wait()
            self._changed = None
        is_compressed, message = self._reader.messages.popleft()
        if not self._reader.messages:
            self._use()
        if is_compressed:
            message = await self.rpcs.decompressor.decompressed(message, self.encoding)
        try:
            return self.method.decode(message)
        except DecodeError:
            raise RpcError(StatusCode.INVALID_ARGUMENT, UNDECODABLE) from None

    # Answering

    async def answer(self) -> None:
        context = RpcContext(self)
        self._release()
        try:
            if self._fault is not None:
                raise self._fault
            await self._within_deadline(context)
        except RpcError as error:
            self.end(error.code, error.message, (*context.trailing, *error.trailing))
            self._fault = error.__traceback__ = None  # Break the cycle: it need not wait for the garbage collector.
        except Exception as error:
            bug_failure(error, f"(any) of {self.head.path}")
            self.end(StatusCode.INTERNAL, "an internal error ended the rpc")
        else:
            self.end(context.status, context.message, context.trailing, now=context.drops_unsent)
        if self._stream.unsent_size:
            size = self._stream.unsent_size
            await taken_within(self.rpcs.bounds, size, self, self._wait_sent(), self.head.path)

    async def _within_deadline(self, context: "RpcContext") -> None:
        if self.deadline is None:
            await self._serve(context)
            return
        try:
            async with asyncio.timeout_at(self.deadline + DEADLINE_LATE_S) as scope:
                await self._serve(context)
        except TimeoutError:
            if not scope.expired():
                raise
            raise RpcError(StatusCode.DEADLINE_EXCEEDED, "the deadline of the rpc has passed") from None

    async def _serve(self, context: "RpcContext") -> None:
        method = self.method
        first = self._requests() if method.is_request_streamed else await self.read()
        running = method.behaviour(first, context)
        if isinstance(running, AsyncGenerator):
            async with aclosing(running) as messages:
                async for message in messages:
                    await context.write(message)
            return
        response = await running
        if not method.is_response_streamed and context.status is StatusCode.OK:
            self.send(method.encode(response))

    async def _requests(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not None:
            yield message

    def send_head(self, metadata: Metadata = ()) -> None:
        """Send the head of the answer, once."""
        if not self._has_head:
            self._has_head = True
            self._stream.send_head(head_block(metadata, GZIP if self._compresses else ""))

    def send(self, message: bytes) -> None:
        """Send a message. Every token takes this path."""
        if not self._has_head:
            self.send_head()
        if self._compresses and len(message) >= COMPRESSED_BYTES_MIN:
            self._stream.send_message(compressed(message), flag=1)
        else:
            self._stream.send_message(message)

    def sender(self, on_full: Callable[[], None]) -> Callable[[bytes], None]:
        """What sends a further message. `on_full`: called during a send if the client becomes slow."""
        self._stream.on_full = on_full
        return self.send if self._compresses else self._stream.send_message

    async def wait_room(self) -> None:
        """Wait until the client is not slow. If it disconnects, the waiting task is cancelled."""
        if not self._stream.has_room:
            room = asyncio.Event()
            self._stream.on_room = room.set
            await room.wait()
            self._stream.on_room = None

    @property
    def has_room(self) -> bool:
        """Whether the client is not slow."""
        return self._stream.has_room

    # What `taken_within` asks for

    def unsent_size(self) -> int:
        return self._stream.unsent_size

    def progress(self) -> int:
        return self._stream.progress()

    def cut(self) -> None:
        self.end(StatusCode.RESOURCE_EXHAUSTED, "the client did not read the answer in time", now=True)

    async def _wait_sent(self) -> None:
        sent = asyncio.Event()
        self._stream.on_sent = sent.set
        await sent.wait()


class RpcContext:
    """What a handler sees of its rpc: the methods of `grpc.aio.ServicerContext` that handlers use.

    `status`, `message`, `trailing`: how the rpc ends if the handler returns. `drops_unsent`: without what waits for a
    client that does not read.
    """

    __slots__ = ("_rpc", "drops_unsent", "message", "status", "trailing")

    def __init__(self, rpc: Rpc) -> None:
        self._rpc = rpc
        self.status = StatusCode.OK
        self.message = ""
        self.trailing: Metadata = ()
        self.drops_unsent = False

    async def read(self) -> Any:
        """The next request, or `grpc.aio.EOF`."""
        message = await self._rpc.read()
        return grpc.aio.EOF if message is None else message

    async def write(self, message: Any) -> None:
        """Send a message, and wait while the client is slow."""
        rpc = self._rpc
        rpc.send(rpc.method.encode(message))
        await rpc.wait_room()

    @property
    def has_room(self) -> bool:
        """Whether the client is not slow."""
        return self._rpc.has_room

    def send_head(self, metadata: Metadata = ()) -> None:
        """Send the head of the answer, once."""
        self._rpc.send_head(metadata)

    def send(self, message: Any) -> None:
        """Send a message without waiting: check `has_room` first, or what waits grows."""
        rpc = self._rpc
        rpc.send(rpc.method.encode(message))

    def sender(self, on_full: Callable[[], None]) -> Callable[[bytes], None]:
        """What sends a message that is encoded already, once the head is sent, and does not wait either.

        `on_full`: called during a send if the client becomes slow.
        """
        return self._rpc.sender(on_full)

    async def send_initial_metadata(self, metadata: Metadata) -> None:
        """Send the head of the answer."""
        self._rpc.send_head(tuple(metadata))

    def invocation_metadata(self) -> Metadata:
        """What the client has sent."""
        return self._rpc.metadata

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline; None: it has none."""
        deadline = self._rpc.deadline
        return None if deadline is None else max(0.0, deadline - clock())

    def set_code(self, code: StatusCode) -> None:
        """Set the status for when the handler returns."""
        self.status = code

    def set_details(self, details: str) -> None:
        """Set its message."""
        self.message = details

    def set_trailing_metadata(self, metadata: Metadata) -> None:
        """Set what goes with it."""
        self.trailing = tuple(metadata)

    async def abort(self, code: StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> NoReturn:
        """End the rpc. Always raises."""
        raise RpcError(code, details, trailing=tuple(trailing_metadata or ()))
