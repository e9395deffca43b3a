"""What a client asks and what it is answered: the messages of HTTP."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus

from msgspec import Struct

from services.core.errors import Failure

_SERVER = "unbroken"
_NONE: Mapping[str, str] = {}
_REASONS = {status.value: status.phrase for status in HTTPStatus}
_STREAM = (
    "Content-Type: text/event-stream; charset=utf-8\r\n"
    "Cache-Control: no-cache\r\n"
    "X-Accel-Buffering: no\r\n"
    f"Server: {_SERVER}\r\n"
    "X-Request-Id: %s\r\n"
    "Date: %s\r\n"
    "%s\r\n"
)
_CHUNKED = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n" + _STREAM
_LAST_CHUNKED = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n" + _STREAM
_UNTIL_CLOSED = "HTTP/1.0 200 OK\r\n" + _STREAM


class HttpRequest(Struct, kw_only=True):
    """What a client asks.

    path: without the query, percent-decoded. headers: by their names in lower case. body: as it came, which may be
    compressed. fault: why there is no whole body. is_chunkable: the client takes an answer in chunks, as in HTTP/1.1.
    keeps_alive: the client may ask for more on the same connection. arguments: what of the path its route leaves open.
    id: what the answer is named by. shared: headers of any answer to it.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes = b""
    fault: Failure | None = None
    is_chunkable: bool = True
    keeps_alive: bool = True
    arguments: Mapping[str, str] = _NONE
    id: str = ""
    shared: Mapping[str, str] = _NONE

    def forget_content(self) -> None:
        """Its headers and body have been read: an answer may take minutes, and they take memory."""
        self.headers, self.body = {}, b""


@dataclass(slots=True)
class Response:
    """A whole answer."""

    body: bytes
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)

    def encode(self, request: HttpRequest, *, is_last: bool) -> bytes:
        """As bytes for the client of the request. is_last: the connection takes no request after this one."""
        fields = self.headers | {
            "Content-Length": str(len(self.body)),
            "Server": _SERVER,
            "X-Request-Id": request.id,
            "Date": _date(int(time.time())),
            **request.shared,
        }
        if is_last:
            fields["Connection"] = "close"
        elif not request.is_chunkable:
            fields["Connection"] = "keep-alive"  # In HTTP/1.0 it is not understood.
        lines = [f"HTTP/1.1 {self.status} {_REASONS.get(self.status, '')}"]
        lines += [f"{name}: {value}" for name, value in fields.items()]
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        return head if request.method == "HEAD" else head + self.body


def stream_head(request_id: str, shared: Mapping[str, str] = _NONE, *, is_chunked: bool, is_last: bool) -> bytes:
    """What stands before a streamed answer. request_id: of the form that `NAME_FORM` says. shared: see
    `HttpRequest`. is_last: as in `encode`.

    Without chunks, as in HTTP/1.0, the end of the connection is the end of the answer.
    """
    head = _UNTIL_CLOSED if not is_chunked else _LAST_CHUNKED if is_last else _CHUNKED
    more = "".join(f"{name}: {value}\r\n" for name, value in shared.items()) if shared else ""
    return (head % (request_id, _date(int(time.time())), more)).encode("ascii")


def last_chunk(events: bytes) -> bytes:
    """The events as the last chunk of a body, and its end."""
    return b"%x\r\n%b\r\n0\r\n\r\n" % (len(events), events)


@lru_cache(maxsize=1)
def _date(second: int) -> str:
    """As HTTP has it: RFC 9110, section 5.6.7."""
    return formatdate(second, usegmt=True)
