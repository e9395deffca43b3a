"""An rpc over gRPC-Web: a request that has come whole, and an answer whose last message is its status."""

from collections.abc import Callable, Mapping

from grpc import StatusCode

from services.core.bounded_executor import BoundedExecutor
from services.core.errors import Failure
from services.http.decompress import body_of
from services.http.grpc.messages import GZIP
from services.http.grpc.metadata import Metadata, RpcError, encoding_fields, failed, text_fields
from services.http.grpc.rpc import Asked, Method, Rpc, Rpcs
from services.http.grpc.web.forms import Form
from services.http.server.exchange import Exchange
from services.http.server.messages import HttpRequest, chunk, last_chunk, stream_fields


class WebRpc(Rpc):
    """One rpc. Its handler begins once the request has come whole: pages cannot send otherwise.

    A client that does not read loses its connection, or over HTTP/2 its stream: a status among messages that wait
    cannot overtake them.
    """

    __slots__ = (
        "_exchange",
        "_form",
        "_has_head",
        "_is_chunked",
        "_is_cut",
        "_last",
        "_request",
        "asked",
    )

    def __init__(self, request: HttpRequest, exchange: Exchange, method: Method, rpcs: Rpcs, form: Form) -> None:
        """`form`: of the answer."""
        self._request = request
        self._exchange = exchange
        self._form = form
        self._is_chunked = request.is_chunkable
        self._has_head = self._is_cut = False
        self._last = b""
        self.asked = Asked(request.path, method, rpcs, request.headers)
        if request.refusal is not None:
            self.asked.fault = failed(request.refusal)

    async def answer(self, form: Form, executor: BoundedExecutor) -> None:
        """Send the answer. `form`: of the request."""
        try:
            await self._receive(form, executor)
        except RpcError as error:
            self.asked.fault = error
        except Failure as failure:
            self.asked.fault = failed(failure)
        self._request.forget_content()
        await self.respond()
        self._exchange.on_full = None  # It refers to the handler.
        if not self._is_cut:
            await self._exchange.finish(self._last, self.asked.rpcs.bounds, self.asked.path)

    @property
    def outlet(self) -> Exchange:
        return self._exchange

    # Receiving

    async def _receive(self, form: Form, executor: BoundedExecutor) -> None:
        """Raises RpcError and Failure."""
        if self.asked.fault is not None:
            return
        body = await body_of(self._request, self._request.body_bytes_max, executor)
        self.asked.feed(await self.asked.rpcs.compression.run(form.decoded, body))
        self.asked.check_end()

    async def next_message(self) -> tuple[bool, bytes] | None:
        if (one := self.asked.reader.next()) is None:
            self.asked.check_rest()
        return one

    # Answering

    def send_head(self, metadata: Metadata = ()) -> None:
        if not self._exchange.is_closing() and (head := self._head(metadata)):
            self._exchange.send(head)

    def _head(self, metadata: Metadata = ()) -> bytes:
        """Begin the answer, once. Returns what must be sent before its first bytes."""
        if self._has_head:
            return b""
        self._has_head = True
        more = {
            **encoding_fields(GZIP if self.asked.compresses else ""),
            **self._request.shared,
            **_joined(metadata),
        }
        return self._exchange.begin_stream(self._request, stream_fields(self._form.content_type, more))

    def send_plain(self, message: bytes) -> None:
        self._send(self._form.encoded(message))

    def sender(self, on_full: Callable[[], None]) -> Callable[[bytes], None]:
        self._exchange.on_full = on_full
        return self.send

    def send_compressed(self, message: bytes) -> None:
        self._send(self._form.encoded(message, flag=1))

    def _send(self, content: bytes) -> None:
        if self._exchange.is_closing():
            return
        head = b"" if self._has_head else self._head()
        self._exchange.send(head + chunk(content) if self._is_chunked else head + content)

    def end(self, code: StatusCode, message: str = "", trailing: Metadata = (), *, now: bool = False) -> None:
        if now:
            self._is_cut = True
            self._exchange.cut()
            return
        head, content = self._head(), self._form.status(code, message, trailing)
        self._last = head + (last_chunk(content) if self._is_chunked else content)


def _joined(metadata: Metadata) -> Mapping[str, str]:
    """Metadata as header fields. Several values of one name are joined. Source: RFC 9110, section 5.3."""
    fields: dict[str, str] = {}
    for name, value in text_fields(metadata):
        fields[name] = f"{fields[name]}, {value}" if name in fields else value
    return fields
