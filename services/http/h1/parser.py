"""Parses the bytes of a client into requests.

The parser is that of Node.js, in its strict setting, by way of httptools. Input that another server might understand as
a different request is an error. This module refuses such input where httptools accepts it.
"""

import re
from collections import deque
from collections.abc import Callable, Mapping
from urllib.parse import unquote

import httptools

from services.core.errors import Failure, Reason, quoted
from services.http.server.context import BrokenHead
from services.http.server.messages import HttpRequest

HEAD_BYTES_MAX = 64 * 1024
"""The target and all headers of one request together; also a single header or trailer that does not end."""
HEADER_BYTES = 32
"""Counted for each header besides its name and value: small ones take time, too. Source: RFC 9113, section 6.5.2."""
CHUNKS_MAX = 32_768
"""Chunks of a body. Chunks of one byte take longer to parse than to arrive, and block the event loop meanwhile."""
VERSIONS = ("1.0", "1.1")
PIPELINED_REQUESTS_MAX = 64
"""Requests in one read. After the last one the connection is closed, and the client must send the rest again."""


class _TooManyPipelined(Exception):
    """PIPELINED_REQUESTS_MAX is reached."""


class RequestParser:
    """Parses the requests of one connection. Do not feed it after `feed` returned False or `break_off`."""

    __slots__ = (
        "_body",
        "_bytes_max",
        "_chunk_count",
        "_head_bytes",
        "_on_head",
        "_parser",
        "_pending_bytes",
        "_request",
        "_target",
        "broken",
        "has_head",
        "headers",
        "is_midway",
        "requests",
        "wants_continue",
    )

    def __init__(self, bytes_max: int, on_head: Callable[[HttpRequest], None] = lambda _: None) -> None:
        """`bytes_max`: the largest body. `on_head`: called with each request before its body is read, see `App`. It may
        lower the request's bound.

        Attributes: `requests`: complete requests, and those with a fault. `broken`: why the bytes after them are not a
        request. `is_midway`: a part of the next request has arrived. `headers`: of that request, or of the broken one,
        by lower-case names. `has_head`: its head is complete. `wants_continue`: the client waits for a 100 response
        before it sends the body; the sender of that response resets this.
        """
        self._bytes_max = bytes_max
        self._on_head = on_head
        self.requests: deque[HttpRequest] = deque()
        self.broken: BrokenHead | None = None
        self.is_midway = self.wants_continue = False
        self._parser = httptools.HttpRequestParser(self)
        self._restart()

    def _restart(self) -> None:
        self._target = b""
        self.headers: dict[str, str] = {}
        self._body = bytearray()
        self._head_bytes = self._pending_bytes = self._chunk_count = 0
        self.has_head = False

    def close(self) -> None:
        """Break the reference cycles: with httptools' parser, and with an exception through its traceback."""
        self.broken = None
        del self._parser

    def feed(self, data: bytes) -> bool:
        """Parse more bytes. Returns whether later bytes can be parsed."""
        progress = self._progress() if self.is_midway else None
        try:
            self._parse(data)
            if progress is not None and self.is_midway:
                self._pending_bytes = self._pending_bytes + len(data) if self._progress() == progress else 0
                if self._pending_bytes > HEAD_BYTES_MAX:
                    raise head_too_large()
            if self.has_head and (refusal := self._request.refusal) is not None:
                self.break_off(refusal)  # The rest need not come.
                return False
        except BrokenHead as broken:
            self.broken = broken
        except Failure as fault:
            self.break_off(fault)
        except _TooManyPipelined:
            pass
        else:
            return True
        return False

    def _progress(self) -> tuple[int, int, int]:
        """Changes when httptools reports something. It buffers a header or a trailer until that is complete."""
        return len(self.requests), self._head_bytes, len(self._body)

    def _parse(self, data: bytes) -> None:
        """Raises BrokenHead, Failure and _TooManyPipelined, also from the callbacks below."""
        while data:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]  # An Upgrade is ignored: what follows is HTTP too.
            except httptools.HttpParserCallbackError as error:
                raise error.__context__ or error from None
            except httptools.HttpParserError as error:
                raise self._wrong(error) from None
            if self.has_head:
                self._restart_at_body()

    def _wrong(self, error: httptools.HttpParserError) -> Failure | BrokenHead:
        if self.has_head:
            return Failure(Reason.INVALID_ARGUMENT, f"the body does not match its headers: {error}")
        return BrokenHead(400, f"this is not an HTTP request: {error}")

    def _restart_at_body(self) -> None:
        """httptools expects another protocol after an Upgrade: have a new parser read the body."""
        self._parser = httptools.HttpRequestParser(self)
        framing = "transfer-encoding" if "transfer-encoding" in self.headers else "content-length"
        self._parser.feed_data(f"POST / HTTP/1.1\r\n{framing}: {self.headers[framing]}\r\n\r\n".encode("latin-1"))

    def break_off(self, fault: Failure) -> None:
        """End the current request with a fault. The rest of it is not parsed."""
        self._add(fault)

    def _add(self, fault: Failure | None = None, *, is_last: bool = False) -> None:
        request = self._request
        request.body = bytes(self._body)
        request.fault = fault
        request.keeps_alive = request.keeps_alive and fault is None and not is_last
        self.requests.append(request)
        self.is_midway = self.wants_continue = False
        self._restart()

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > HEAD_BYTES_MAX:
            raise head_too_large()

    # Callbacks of httptools. After the head is complete they report trailers, which are ignored, or, to a parser that
    # restarted at the body, a made-up head.

    def on_message_begin(self) -> None:
        self.is_midway = True

    def on_url(self, url: bytes) -> None:
        if not self.has_head:
            self._count_head(len(url))
            self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value) + HEADER_BYTES)
        if not self.has_head:
            key, text = name.decode("latin-1").lower(), value.decode("latin-1").rstrip(" \t")
            given = self.headers.get(key)
            self.headers[key] = text if given is None else f"{given}, {text}"  # RFC 9110, section 5.3.

    def on_headers_complete(self) -> None:
        if self.has_head:
            return
        version = self._parser.get_http_version()
        _check_framing(version, self.headers)
        target = self._target.decode("latin-1")
        if "host" in self.headers and (authority := _authority_of(target)) is not None:
            self.headers["host"] = authority  # RFC 9112, section 3.2.2.
        self._request = HttpRequest(
            method=self._parser.get_method().decode("ascii"),
            path=path_of(target),
            headers=self.headers,
            body_bytes_max=self._bytes_max,
            is_chunkable=version == "1.1",
            keeps_alive=self._parser.should_keep_alive(),
        )
        self._on_head(self._request)
        self.has_head = True
        if int(self.headers.get("content-length", 0)) > self._request.body_bytes_max:
            raise too_large(self._request.body_bytes_max)
        if "expect" in self.headers and version == "1.1":
            self.wants_continue = self.headers["expect"].lower() == "100-continue"

    def on_chunk_header(self) -> None:
        self._chunk_count += 1
        if self._chunk_count > CHUNKS_MAX:
            detail = f"the body comes in more than {CHUNKS_MAX} chunks: send fewer and larger ones"
            raise Failure(Reason.INVALID_ARGUMENT, detail)

    def on_body(self, piece: bytes) -> None:
        if len(self._body) + len(piece) > self._request.body_bytes_max:
            raise too_large(self._request.body_bytes_max)
        self._body += piece

    def on_message_complete(self) -> None:
        if self._parser.should_upgrade() and self._has_body():
            return  # httptools has skipped the body: `_parse` restarts there.
        is_last = len(self.requests) + 1 >= PIPELINED_REQUESTS_MAX
        self._add(is_last=is_last)
        if is_last:
            raise _TooManyPipelined

    def _has_body(self) -> bool:
        return "transfer-encoding" in self.headers or int(self.headers.get("content-length", 0)) > 0


def path_of(target: str) -> str:
    """The path without the query, and without the host that clients of a proxy add: RFC 9112, section 3.2.2."""
    path, _, _ = target.partition("?")
    if not path.startswith("/") and "://" in path:
        path = "/" + path.partition("://")[2].partition("/")[2]
    return unquote(path) if "%" in path else path


def _authority_of(target: str) -> str | None:
    """The host that a target with a scheme names; None for others."""
    if target.startswith("/") or "://" not in target:
        return None
    return re.split("[/?]", target.partition("://")[2], maxsplit=1)[0]


def head_too_large() -> BrokenHead:
    """What is wrong with a head of more than HEAD_BYTES_MAX."""
    return BrokenHead(431, f"the head of the request has more than {HEAD_BYTES_MAX} bytes: send fewer headers")


def _check_framing(version: str, headers: Mapping[str, str]) -> None:
    """Raises BrokenHead. Source: RFC 9112, sections 2.3 and 6.1."""
    if version not in VERSIONS:
        raise BrokenHead(505, f"HTTP/{version} is not supported: use one of {', '.join(VERSIONS)}")
    if (coding := headers.get("transfer-encoding")) is None:
        return
    if version != "1.1":
        raise BrokenHead(400, f"HTTP/{version} has no Transfer-Encoding: send a Content-Length")
    if coding.lower() != "chunked":
        raise BrokenHead(501, f"the Transfer-Encoding {quoted(coding)} is not supported: use chunked")


def too_large(bytes_max: int) -> Failure:
    """The failure of a body of more than `bytes_max`."""
    return Failure(Reason.BODY_TOO_LARGE, f"the body is larger than {bytes_max} bytes: send a smaller one")
