"""An rpc on a stream of HTTP/2, which is gRPC's own wire: trailers end it."""

import asyncio
from collections.abc import Callable

from grpc import StatusCode

from services.core.errors import Failure, Reason
from services.http.grpc.messages import GZIP, MessageReader
from services.http.grpc.metadata import Metadata, RpcError, failed, head_block, trailers_block
from services.http.grpc.rpc import Asked, Method, Rpc, Rpcs
from services.http.h1.parser import too_large
from services.http.h2.request import Host, Request
from services.http.h2.stream import Stream
from services.http.h2.wire.fields import RequestHead
from services.http.h2.wire.frames import ErrorCode
from services.http.server.config import PROBE_RPC
from services.http.server.exchange import taken_within


class Ended(Request):
    """What ends a stream of gRPC: trailers, or a head that has them as well."""

    __slots__ = ("_has_head",)

    def __init__(self, host: Host, stream: Stream, head_size: int) -> None:
        super().__init__(host, stream, head_size)
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

    __slots__ = ("_error",)

    def __init__(self, host: Host, stream: Stream, error: RpcError) -> None:
        super().__init__(host, stream, head_size=0)
        self._error = error.with_traceback(None)  # Break a cycle: it need not wait for the garbage collector.
        self.begin()

    async def answer(self) -> None:
        self.end(self._error.code, self._error.message, self._error.trailing)


class StreamRpc(Ended, Rpc):
    """An rpc: its request, and the task of its handler.

    A handler with one request begins once that has come, one with a stream of requests at once.
    """

    __slots__ = (
        "_changed",
        "_held_size",
        "_request_has_ended",
        "_unused_size",
        "asked",
    )

    def __init__(self, host: Host, stream: Stream, head: RequestHead, method: Method, rpcs: Rpcs) -> None:
        super().__init__(host, stream, head.size)
        self._changed: asyncio.Event | None = None
        self._request_has_ended = False
        self._held_size = self._unused_size = 0
        self.asked = Asked(head.path, method, rpcs, head.headers)
        if method.is_request_streamed or self.asked.fault is not None:
            self._begin()

    @property
    def outlet(self) -> Stream:
        return self._stream

    # Receiving

    def on_data(self, data: bytes) -> None:
        is_streamed = self.asked.method.is_request_streamed
        if self.asked.fault is not None or (self._has_begun and not is_streamed):
            return  # The window stays closed.
        server_bytes_max = self._host.context.app.body_bytes_max
        bytes_max = self.asked.bytes_max or server_bytes_max
        if self._held_size + len(data) > bytes_max:
            self._set_fault(failed(too_large(bytes_max)))
            return
        if self._host.bodies_size + len(data) > server_bytes_max:
            self._stream.reset(ErrorCode.REFUSED_STREAM)  # Alone it would not be too large: it may come again.
            return
        self._hold(len(data))
        self._unused_size += len(data)
        try:
            self.asked.feed(data)
            if not is_streamed or not self.asked.reader.has_next:
                self._use()
        except RpcError as error:
            self._set_fault(error)
        else:
            self._wake()

    def _hold(self, size: int) -> None:
        """Count content that is kept until it is read, or no longer if `size` is negative."""
        self._host.bodies_size += size
        self._held_size += size

    def _use(self) -> None:
        """Let the client send on: what has come is used, or a part of a message that is bounded."""
        size, self._unused_size = self._unused_size, 0
        self._stream.use(size)

    def on_end(self) -> None:
        self._request_has_ended = True
        if self.asked.fault is None:
            try:
                self.asked.check_end()
            except RpcError as error:
                self._set_fault(error)
            else:
                if not self._has_begun:
                    self._begin()
        self._wake()

    def _begin(self) -> None:
        """Answer when it is the rpc's turn. A health check waits for none."""
        self.begin(at_once=self.asked.path == PROBE_RPC)

    def on_late(self) -> None:
        within = f"within {self._host.context.config.body_read_s_max:g} s"
        self._set_fault(failed(Failure(Reason.DEADLINE_EXCEEDED, f"the request did not arrive {within}")))

    def _set_fault(self, error: RpcError) -> None:
        """End the rpc: with the next read if it has begun."""
        self.asked.fault = error
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
        """Drop what was not read."""
        self.asked.reader = MessageReader()
        self._hold(-self._held_size)

    async def next_message(self) -> tuple[bool, bytes] | None:
        while (one := self._next()) is None:
            if self.asked.fault is not None:
                raise self.asked.fault
            if self._request_has_ended:
                self.asked.check_rest()
                return None
            self._changed = asyncio.Event()
            await self._changed.wait()
            self._changed = None
        return one

    def _next(self) -> tuple[bool, bytes] | None:
        """The next message, if it has come. Raises RpcError."""
        reader = self.asked.reader
        if (one := reader.next()) is not None:
            self._hold(reader.size - self._held_size)
            if not reader.has_next:
                self._use()
        return one

    # Answering

    async def answer(self) -> None:
        try:
            await self.respond()
            if size := self._stream.unsent_size:
                await taken_within(self.asked.rpcs.bounds, size, self, self._wait_sent(), self.asked.path)
        finally:
            self._release()

    def send_head(self, metadata: Metadata = ()) -> None:
        """Send the head of the answer, once."""
        if not self._has_head:
            self._has_head = True
            self._stream.send_head(head_block(metadata, GZIP if self.asked.compresses else ""))

    def send_plain(self, message: bytes) -> None:
        if not self._has_head:
            self.send_head()
        self._stream.send_message(message)

    def sender(self, on_full: Callable[[], None]) -> Callable[[bytes], None]:
        self._stream.on_full = on_full
        return self.send if self.asked.compresses else self._stream.send_message

    def send_compressed(self, message: bytes) -> None:
        if not self._has_head:
            self.send_head()
        self._stream.send_message(message, flag=1)

    # What `taken_within` asks for

    @property
    def on_evicted(self) -> Callable[[str], None] | None:
        return self._stream.on_evicted

    @on_evicted.setter
    def on_evicted(self, callback: Callable[[str], None] | None) -> None:
        self._stream.on_evicted = callback

    def unsent_size(self) -> int:
        return self._stream.unsent_size

    def progress(self) -> int:
        return self._stream.progress()

    def cut(self) -> None:
        error = failed(Failure(Reason.SLOW_CLIENT, "the client did not read the answer in time"))
        self.end(error.code, error.message, error.trailing, now=True)
