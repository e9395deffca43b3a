"""One rpc, whichever wire it came on: the handler that answers it, and the context that the handler sees.

The context is the one of services/rpc/context.py, with what generated code and grpcio's health and reflection call.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import Any, NoReturn, Protocol

import grpc
from google.protobuf.message import DecodeError
from grpc import StatusCode

from services.core.common_layers import bug_failure
from services.core.errors import Failure, Reason
from services.core.flow.client_flow import ClientBounds
from services.core.tenant import EVERYBODY, Tenant
from services.http.grpc.messages import (
    COMPRESSED_BYTES_MIN,
    GZIP,
    IDENTITY,
    INLINE_BYTES_MAX,
    Compression,
    MessageReader,
    compressed,
    wants_gzip,
)
from services.http.grpc.metadata import Metadata, RpcError, failed, metadata_in, misused, timeout_s_in
from services.http.server.config import STRANGER_BODY_BYTES_MAX
from services.http.server.exchange import wait_room
from services.runtime.loop import clock

_READ = MessageReader()
"""That of all requests whose only message was read. Nothing is fed to it."""
DEADLINE_LATE_S = 0.1
"""How long after its deadline a handler is cancelled. One that watches the deadline itself has a better answer."""
UNDECODABLE = "the request cannot be decoded: send a message of the type that the .proto file names"


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
    compression: Compression

    def check(self, path: str, headers: Mapping[str, str]) -> Tenant:
        """Returns the caller's tenant. Raises Failure if the client may not call the method."""
        ...

    def is_open(self, path: str) -> bool:
        """Whether clients without a key may call the method, where clients need keys."""
        ...

    def on_refused(self, path: str, failure: Failure) -> None:
        """An rpc has failed before its handler was called."""
        ...


class Asked:
    """What a client asks for.

    `deadline`: in event-loop time. `encoding`: of compressed requests. `compresses`: whether large messages are sent
    compressed. `fault`: why the request cannot be answered. `reader`: of its messages. `tenant`: whose key it has.
    """

    __slots__ = (
        "compresses",
        "deadline",
        "encoding",
        "fault",
        "metadata",
        "method",
        "path",
        "reader",
        "rpcs",
        "tenant",
    )

    def __init__(self, path: str, method: Method, rpcs: Rpcs, headers: Mapping[str, str]) -> None:
        """`headers`: of the request."""
        self.path = path
        self.method = method
        self.rpcs = rpcs
        self.metadata: Metadata = ()
        self.tenant = EVERYBODY
        self.deadline: float | None = None
        self.encoding = headers.get("grpc-encoding", IDENTITY)
        self.compresses = wants_gzip(headers)
        self.fault: RpcError | None = None
        self.reader = MessageReader()
        try:
            self._check(headers)
        except RpcError as error:
            self.fault = error
        except Failure as failure:
            self.fault = failed(failure)

    @property
    def bytes_max(self) -> int | None:
        """The largest request; None: as large as the server takes."""
        return STRANGER_BODY_BYTES_MAX if self.rpcs.is_open(self.path) else None

    def _check(self, headers: Mapping[str, str]) -> None:
        """Raises RpcError and Failure. Clients without a key learn of nothing else."""
        self.tenant = self.rpcs.check(self.path, headers)
        if (timeout_s := timeout_s_in(headers)) is not None:
            self.deadline = clock() + timeout_s
        self.metadata = metadata_in(headers)
        if self.encoding not in (IDENTITY, GZIP):
            raise misused(StatusCode.UNIMPLEMENTED, f"grpc-encoding {self.encoding[:50]} is not supported: use gzip")

    def feed(self, data: bytes) -> None:
        """Content of the request has come. Raises RpcError if a message is too large, or one too many."""
        self.reader.feed(data)
        if not self.method.is_request_streamed and self.reader.has_more_than_one:
            raise misused(StatusCode.INTERNAL, "several messages where one is expected")

    def check_end(self) -> None:
        """The request is complete. Raises RpcError if it lacks its only message."""
        if not self.method.is_request_streamed and not self.reader.has_next:
            self.check_rest()
            raise misused(StatusCode.INTERNAL, "no message where one is expected")

    def check_rest(self) -> None:
        """All messages were read. Raises RpcError if something is left."""
        if self.reader.size:
            raise misused(StatusCode.INTERNAL, "the request ends within a message")


class Outlet(Protocol):
    """Where the messages of an rpc go: a stream of HTTP/2, or an exchange of either version. See `Exchange`."""

    on_evicted: Callable[[str], None] | None
    on_full: Callable[[], None] | None
    on_room: Callable[[], None] | None

    @property
    def has_room(self) -> bool: ...

    def hold(self, size: int) -> None:
        """Count what waits outside until there is room."""
        ...

    def progress(self) -> int:
        """A number that changes whenever the client takes something, while something waits for it."""
        ...


class Rpc(ABC):
    """An rpc. If the client cancels it or disconnects, the handler is cancelled in its own frame."""

    __slots__ = ()

    asked: Asked

    @property
    @abstractmethod
    def outlet(self) -> Outlet:
        """Where its messages go."""

    # Receiving

    @abstractmethod
    async def next_message(self) -> tuple[bool, bytes] | None:
        """The next message, and whether it is compressed; None after the last. Raises RpcError."""

    async def read(self) -> Any:
        """The next message, decoded; None after the last. Raises RpcError, and Failure(OVERLOADED)."""
        if self.asked.method.is_request_streamed:
            await asyncio.sleep(0)  # A client that sends many messages at once does not keep the event loop.
        if (one := await self.next_message()) is None:
            return None
        is_compressed, message = one
        if is_compressed:
            message = await self.asked.rpcs.compression.decompressed(message, self.asked.encoding)
        try:
            return self.asked.method.decode(message)
        except DecodeError:
            raise failed(Failure(Reason.INVALID_ARGUMENT, UNDECODABLE)) from None

    async def _only(self) -> Any:
        """The only message. Raises as `read` does."""
        message = await self.read()
        self.asked.reader = _READ
        return message

    async def _requests(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not None:
            yield message

    # Answering

    @abstractmethod
    def send_head(self, metadata: Metadata = ()) -> None:
        """Send the head of the answer, once."""

    @abstractmethod
    def send_plain(self, message: bytes) -> None:
        """Send a message as it is."""

    def send(self, message: bytes) -> None:
        """Send a message. One that is worth it is compressed, unless that would hold up other streams."""
        if self.asked.compresses and COMPRESSED_BYTES_MIN <= len(message) <= INLINE_BYTES_MAX:
            self.send_compressed(compressed(message))
        else:
            self.send_plain(message)

    @abstractmethod
    def sender(self, on_full: Callable[[], None]) -> Callable[[bytes], None]:
        """What sends a further message. `on_full`: called during a send if the client becomes slow."""

    @abstractmethod
    def send_compressed(self, message: bytes) -> None:
        """Send a message that is compressed already."""

    @abstractmethod
    def end(self, code: StatusCode, message: str = "", trailing: Metadata = (), *, now: bool = False) -> None:
        """Send the status. `now`: without what waits for a client that does not read."""

    async def send_any(self, message: bytes) -> None:
        """Send a message. A large one is compressed in a thread, unless that has too much to do."""
        if self.asked.compresses and len(message) > INLINE_BYTES_MAX:
            try:
                self.send_compressed(await self.asked.rpcs.compression.run(compressed, message))
            except Failure:
                self.send(message)
        else:
            self.send(message)

    async def respond(self) -> None:
        """Run the handler, and end with its status. Raises only CancelledError."""
        context = RpcContext(self)
        try:
            if self.asked.fault is not None:
                raise self.asked.fault
            await (self._serve(context) if self.asked.deadline is None else self._within_deadline(context))
        except RpcError as error:
            self._note_refused(context, error.failure)
            context.status, context.message = error.code, error.message
            context.trailing = (*context.trailing, *error.trailing)
            # Break the cycle: it need not wait for the garbage collector.
            self.asked.fault = error.__traceback__ = None
        except Failure as failure:
            self._note_refused(context, failure)
            context.fail(failure)
            failure.clear_tracebacks()
        except Exception as error:
            # Generated code sets the status and raises for a method that its service lacks.
            if isinstance(error, NotImplementedError) and context.status is StatusCode.UNIMPLEMENTED:
                context.trailing = misused(context.status, context.message).trailing
            else:
                context.fail(bug_failure(error, f"(any) of {self.asked.path}"))
        self.end(context.status, context.message, context.trailing, now=context.drops_unsent)

    async def _within_deadline(self, context: "RpcContext") -> None:
        assert self.asked.deadline is not None, "there is one"
        try:
            async with asyncio.timeout_at(self.asked.deadline + DEADLINE_LATE_S) as scope:
                await self._serve(context)
        except TimeoutError:
            if not scope.expired():
                raise
            raise failed(Failure(Reason.DEADLINE_EXCEEDED, "the deadline of the rpc has passed")) from None

    def _note_refused(self, context: "RpcContext", failure: Failure | None) -> None:
        if not context.has_begun and failure is not None:
            self.asked.rpcs.on_refused(self.asked.path, failure)

    async def _serve(self, context: "RpcContext") -> None:
        method = self.asked.method
        request = self._requests() if method.is_request_streamed else await self._only()
        context.has_begun = True
        running = method.behaviour(request, context)
        del request  # An answer may take minutes.
        if isinstance(running, AsyncGenerator):
            async with aclosing(running) as messages:
                async for message in messages:
                    await context.write(message)
            return
        response = await running
        if not method.is_response_streamed and context.status is StatusCode.OK:
            await self.send_any(method.encode(response))


class RpcContext:
    """What a handler sees of its rpc: see `Context`.

    `status`, `message`, `trailing`: how the rpc ends if the handler returns. `drops_unsent`: without what waits for a
    client that does not read. `has_begun`: the handler was called.
    """

    __slots__ = ("_rpc", "drops_unsent", "has_begun", "message", "status", "trailing")

    def __init__(self, rpc: Rpc) -> None:
        self._rpc = rpc
        self.status = StatusCode.OK
        self.message = ""
        self.trailing: Metadata = ()
        self.drops_unsent = self.has_begun = False

    async def read(self) -> Any:
        """The next request of a stream of requests; None after the last."""
        return await self._rpc.read()

    async def write(self, message: Any) -> None:
        """Send a message, and wait while the client is slow."""
        rpc = self._rpc
        await rpc.send_any(rpc.asked.method.encode(message))
        await wait_room(rpc.outlet)

    @property
    def has_room(self) -> bool:
        """Whether the client is not slow."""
        return self._rpc.outlet.has_room

    @property
    def on_evicted(self) -> Callable[[str], None] | None:
        """See `Outlet`."""
        return self._rpc.outlet.on_evicted

    @on_evicted.setter
    def on_evicted(self, callback: Callable[[str], None] | None) -> None:
        self._rpc.outlet.on_evicted = callback

    def hold(self, size: int) -> None:
        """Count what waits outside until there is room."""
        self._rpc.outlet.hold(size)

    def send_head(self, metadata: Metadata = ()) -> None:
        """Send the head of the answer, once."""
        self._rpc.send_head(metadata)

    def send(self, message: Any) -> None:
        """Send a message without waiting: check `has_room` first, or what waits grows."""
        rpc = self._rpc
        rpc.send(rpc.asked.method.encode(message))

    def sender(self, on_full: Callable[[], None]) -> Callable[[bytes], None]:
        """What sends a message that is encoded already, once the head is sent, and does not wait either.

        `on_full`: called during a send if the client becomes slow.
        """
        return self._rpc.sender(on_full)

    def progress(self) -> int:
        """A number that changes whenever the client takes something, while something waits for it."""
        return self._rpc.outlet.progress()

    @property
    def tenant(self) -> Tenant:
        """The tenant of the caller."""
        return self._rpc.asked.tenant

    def invocation_metadata(self) -> Metadata:
        """What the client has sent."""
        return self._rpc.asked.metadata

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline; None: it has none."""
        deadline = self._rpc.asked.deadline
        return None if deadline is None else max(0.0, deadline - clock())

    def set_code(self, code: StatusCode) -> None:
        """Set the status for when the handler ends, as in grpc.aio."""
        self.status = code

    def set_details(self, details: str) -> None:
        """Set its message."""
        self.message = details

    def fail(self, failure: Failure, request_id: str = "") -> None:
        """End the rpc with the failure once the handler returns. A slow client gets no more than its status."""
        error = failed(failure, request_id)
        self.status, self.message, self.trailing = error.code, error.message, error.trailing
        self.drops_unsent = failure.reason is Reason.SLOW_CLIENT

    async def abort(self, code: StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> NoReturn:
        """End the rpc, as in grpc.aio. Always raises."""
        raise RpcError(code, details, trailing=tuple(trailing_metadata or ()))
