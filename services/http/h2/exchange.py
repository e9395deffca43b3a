"""A request over HTTP/2 for the application that HTTP/1.1 serves, and the way in which its answer is sent."""

from collections.abc import Callable, Mapping

from services.core.errors import Failure, Reason
from services.core.flow.client_flow import ClientBounds
from services.http.h1.parser import too_large
from services.http.h2.request import Host, Request
from services.http.h2.stream import Stream
from services.http.h2.wire.fields import RequestHead, encode_fields, encode_status
from services.http.h2.wire.frames import ErrorCode
from services.http.server.config import PROBE_PATHS
from services.http.server.cork import Cork
from services.http.server.exchange import log_left, taken_within
from services.http.server.messages import HttpRequest, Response


class H2Exchange(Request):
    """One request, and the way back to its client. See `Exchange` and `Receiver`."""

    __slots__ = ("_body", "_broken", "_request", "send")

    def __init__(self, host: Host, stream: Stream, head: RequestHead) -> None:
        super().__init__(host, stream, head.size)
        self._body = bytearray()
        request = HttpRequest(
            method=head.method,
            path=head.path,
            headers=head.headers,
            body_bytes_max=host.context.app.body_bytes_max,
            is_chunkable=False,
        )
        self._request: HttpRequest | None = request
        self.send = stream.send  # Every event takes this path.
        self._broken = head.broken
        if self._broken is not None:
            self.begin()
            return
        host.context.app.on_head(request)
        if request.refusal is not None:
            self._refuse(request.refusal)
        elif head.content_length is not None and head.content_length > request.body_bytes_max:
            self._refuse(too_large(request.body_bytes_max))

    # Receiving

    def on_data(self, data: bytes) -> None:
        if self._has_begun:  # The request was refused.
            self._stream.use(len(data))
            return
        assert self._request is not None, "it has not begun"
        if len(self._body) + len(data) > self._request.body_bytes_max:
            self._refuse(too_large(self._request.body_bytes_max))
        elif self._host.bodies_size + len(data) > self._host.context.app.body_bytes_max:
            self._stream.reset(ErrorCode.REFUSED_STREAM)  # Alone it would not be too large: it may come again.
        else:
            self._body += data
            self._host.bodies_size += len(data)
            self._stream.use(len(data))

    def on_end(self) -> None:
        request = self._request
        if not self._has_begun and request is not None:
            request.body = bytes(self._body)
            self._release()
            self.begin(at_once=request.path in PROBE_PATHS)

    def on_late(self) -> None:
        if self._has_begun:  # The rest of a request that was refused.
            self._stream.reset(ErrorCode.NO_ERROR)  # RFC 9113, section 8.1.
            return
        within = f"within {self._host.context.config.body_read_s_max:g} s"
        self._refuse(Failure(Reason.DEADLINE_EXCEEDED, f"the body did not arrive {within}"))

    def _leave_rest(self) -> None:
        """Discard it for a while: many clients read an answer only after their request, and lose it by a reset."""
        self._host.on_answered(self._stream)

    def on_reset(self) -> None:
        self._release()
        super().on_reset()

    def _refuse(self, fault: Failure) -> None:
        """Answer without the rest of the request. A handler finds the fault before it reads the body."""
        assert self._request is not None, "it has not begun"
        self._request.fault = fault
        self._release()
        self.begin()

    def _release(self) -> None:
        self._host.bodies_size -= len(self._body)
        self._body = bytearray()

    async def answer(self) -> None:
        request, self._request = self._request, None  # An answer may take minutes.
        self._forget_head()
        assert request is not None, "a request is answered once"
        app = self._host.context.app
        if self._broken is None:
            await app.answer(request, self)
        else:
            refused, response = app.refusal(self._broken, request.headers)
            await self.finish(self.encode(response, refused), self._host.context.config.client, refused.id)

    # Sending

    @property
    def keeps_alive(self) -> bool:
        """Whether the connection takes further requests."""
        return True

    @keeps_alive.setter
    def keeps_alive(self, value: bool) -> None:
        if not value:
            self._host.drain()

    @property
    def has_room(self) -> bool:
        return self._stream.has_room

    @property
    def on_full(self) -> Callable[[], None] | None:
        return self._stream.on_full

    @on_full.setter
    def on_full(self, callback: Callable[[], None] | None) -> None:
        self._stream.on_full = callback

    @property
    def on_room(self) -> Callable[[], None] | None:
        return self._stream.on_room

    @on_room.setter
    def on_room(self, callback: Callable[[], None] | None) -> None:
        self._stream.on_room = callback

    @property
    def on_evicted(self) -> Callable[[str], None] | None:
        return self._stream.on_evicted

    @on_evicted.setter
    def on_evicted(self, callback: Callable[[str], None] | None) -> None:
        self._stream.on_evicted = callback

    @property
    def cork(self) -> Cork:
        return self._host.context.cork

    def is_closing(self) -> bool:
        return self._stream.is_closed

    def begin_stream(self, request: HttpRequest, fields: Mapping[str, str]) -> bytes:
        self._send_head(200, fields)
        return b""

    def encode(self, response: Response, request: HttpRequest) -> bytes:
        self._send_head(response.status, response.fields(request))
        return b"" if request.method == "HEAD" else response.body

    def _send_head(self, status: int, fields: Mapping[str, str]) -> None:
        self._stream.send_head(encode_status(status) + encode_fields(fields.items()))

    def write(self, data: bytes) -> None:
        self._stream.send(data)

    def unsent_size(self) -> int:
        return self._stream.unsent_size

    def hold(self, size: int) -> None:
        self._stream.hold(size)

    def progress(self) -> int:
        return self._stream.progress()

    async def finish(self, last: bytes, bounds: ClientBounds, request_id: str) -> None:
        stream = self._stream
        if stream.is_closed:
            log_left(request_id)
            return
        stream.end(last)
        if stream.unsent_size:
            await taken_within(bounds, len(last), self, self._wait_sent(), request_id)

    def cut(self) -> None:
        self._stream.reset(ErrorCode.CANCEL)
