"""What stands before and after the events of a streamed answer, and what aiohttp is told of what it did not send.

aiohttp's own head is sent by a coroutine: from a sink that takes a task, and it takes a write of its own.
"""

import time
from email.utils import formatdate
from functools import lru_cache

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import SERVER_SOFTWARE

_HEAD = (
    "Content-Type: text/event-stream; charset=utf-8\r\n"
    "Cache-Control: no-cache\r\n"
    "X-Accel-Buffering: no\r\n"
    f"Server: {SERVER_SOFTWARE}\r\n"
    "X-Request-Id: %s\r\n"
    "Date: %s\r\n"
    "\r\n"
)
_CHUNKED = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n" + _HEAD
_LAST_CHUNKED = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n" + _HEAD
_UNTIL_CLOSED = "HTTP/1.0 200 OK\r\n" + _HEAD


def head_of(request_id: str, *, is_chunked: bool, is_last: bool) -> bytes:
    """request_id: of the form that `NAME_FORM` says. is_last: the connection takes no request after this one.

    Without chunks, as in HTTP/1.0, the end of the connection is the end of the answer.
    """
    head = _UNTIL_CLOSED if not is_chunked else _LAST_CHUNKED if is_last else _CHUNKED
    return (head % (request_id, _date(int(time.time())))).encode("ascii")


def whole(response: web.Response, request_id: str, *, is_last: bool) -> bytes:
    """A response with its body, to be written as it is. is_last: see `head_of`."""
    body = response.body
    assert isinstance(body, bytes), "its body is no stream"
    fields = {**response.headers, "X-Request-Id": request_id, "Content-Length": str(len(body))}
    fields |= {"Server": SERVER_SOFTWARE, "Date": _date(int(time.time()))}
    if is_last:
        fields["Connection"] = "close"
    lines = [f"HTTP/1.1 {response.status} {response.reason}", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def last_chunk(events: bytes) -> bytes:
    """The events as the last chunk of a body, and its end."""
    return b"%x\r\n%b\r\n0\r\n\r\n" % (len(events), events)


@lru_cache(maxsize=1)
def _date(second: int) -> str:
    """As HTTP has it: RFC 9110, section 5.6.7."""
    return formatdate(second, usegmt=True)


class Sent(web.StreamResponse):
    """A response that was written past aiohttp, which does nothing more with it."""

    def __init__(self, *, keeps_alive: bool) -> None:
        """keeps_alive: whether the connection takes the next request."""
        super().__init__()
        self._keeps_alive = keeps_alive

    @property
    def keep_alive(self) -> bool:
        return self._keeps_alive

    @property
    def prepared(self) -> bool:
        return True

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        assert not data, "all has been written"
