"""HTTP messages: a request, a whole response, and the head and end of a streamed one."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus

from msgspec import Struct

from services.core.errors import Failure
from services.core.tenant import EVERYBODY, Tenant

_SERVER = "unbroken"
_NONE: Mapping[str, str] = {}
_CHUNKED = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n"
_LAST_CHUNKED = f"{_CHUNKED}Connection: close\r\n"
_UNTIL_CLOSED = "HTTP/1.0 200 OK\r\n"
_PHRASES = {status.value: status.phrase for status in HTTPStatus}


class HttpRequest(Struct, kw_only=True):
    """A request of a client.

    `path`: percent-decoded, without the query. `headers`: by lower-case names. `body`: as received, possibly
    compressed. `body_bytes_max`: the largest that is accepted, also after decompression. `fault`: why the body is
    incomplete. `refusal`: why the client may not send it, as its head shows: it is answered at once, without its body.
    `is_chunkable`: the answer may come in chunks, as in HTTP/1.1. `keeps_alive`: the client may send another request on
    the connection. `arguments`: the variable parts of the path. `id`: names the request in the response and in logs.
    `shared`: headers that every response to this request has. `tenant`: whose key it carries.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes = b""
    body_bytes_max: int = 0
    fault: Failure | None = None
    refusal: Failure | None = None
    is_chunkable: bool = True
    keeps_alive: bool = True
    arguments: Mapping[str, str] = _NONE
    id: str = ""
    shared: Mapping[str, str] = _NONE
    tenant: Tenant = EVERYBODY

    def forget_content(self) -> None:
        """Free headers and body once they have been read: an answer may take minutes."""
        self.headers, self.body = {}, b""


@dataclass(slots=True)
class Response:
    """A response that is sent whole."""

    body: bytes
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)

    def fields(self, request: HttpRequest) -> dict[str, str]:
        """The header fields of the response to `request`, whichever version of HTTP."""
        fields = self.headers | {
            "Content-Length": str(len(self.body)),
            "Server": _SERVER,
            "X-Request-Id": request.id,
            "Date": _date(int(time.time())),
            **request.shared,
        }
        if self.status == 204:
            del fields["Content-Length"]  # RFC 9110, section 8.6.
        return fields

    def encode(self, request: HttpRequest, *, is_last: bool) -> bytes:
        """The response to `request` over HTTP/1.1. `is_last`: the connection takes no further request."""
        fields = self.fields(request)
        if is_last:
            fields["Connection"] = "close"
        elif not request.is_chunkable:
            fields["Connection"] = "keep-alive"  # HTTP/1.0 closes otherwise.
        lines = [f"HTTP/1.1 {self.status} {_PHRASES.get(self.status, '')}"]
        lines += [f"{name}: {value}" for name, value in fields.items()]
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        return head if request.method == "HEAD" else head + self.body


def stream_fields(content_type: str, more: Mapping[str, str]) -> dict[str, str]:
    """The header fields of a streamed response. `more`: further ones."""
    return {
        "Content-Type": content_type,
        "Cache-Control": "no-cache",
        "X-Accel-Buffering": "no",
        **more,
        "Server": _SERVER,
        "Date": _date(int(time.time())),
    }


def stream_head(fields: Mapping[str, str], *, is_chunked: bool, is_last: bool) -> bytes:
    """The head of a streamed response over HTTP/1.1. `is_last`: the connection takes no further request.

    Without chunks, as in HTTP/1.0, the end of the connection ends the answer.
    """
    start = _UNTIL_CLOSED if not is_chunked else _LAST_CHUNKED if is_last else _CHUNKED
    return (start + "".join([f"{name}: {value}\r\n" for name, value in fields.items()]) + "\r\n").encode("latin-1")


def chunk(content: bytes) -> bytes:
    """The content as a chunk of a body."""
    return b"%x\r\n%b\r\n" % (len(content), content)


def last_chunk(events: bytes) -> bytes:
    """The events as the last chunk of a body, and the end of the body."""
    return b"%x\r\n%b\r\n0\r\n\r\n" % (len(events), events)


@lru_cache(maxsize=1)
def _date(second: int) -> str:
    """The value of a Date header. Source: RFC 9110, section 5.6.7."""
    return formatdate(second, usegmt=True)
