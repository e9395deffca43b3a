"""Cuts what comes from a client into requests.

The bytes are read by httptools, whose parser is that of Node.js, in its strict setting: what two servers could take for
different requests is an error. What it lets pass all the same is refused here.
"""

from collections import deque
from collections.abc import Mapping
from urllib.parse import unquote

import httptools

from services.core.errors import Failure, Reason, quoted
from services.http.server.messages import HttpRequest

HEAD_BYTES_MAX = 64 * 1024
"""Of the target and all headers of one request; and of a header, or a trailer, that does not end."""
HEADER_BYTES = 32
"""Of those, for each header besides its name and its value: small ones take time. Source: RFC 9113, section 6.5.2."""
CHUNKS_MAX = 32_768
"""Of a body: those of a byte each take longer to read than they take to arrive, and nobody else is served meanwhile."""
VERSIONS = ("1.0", "1.1")
REQUESTS_AHEAD_MAX = 64
"""That come in one read. After the last of them the connection is closed; its client has to send the rest again."""


class BrokenHead(Exception):
    """What came is no request, in a sentence; nothing after it can be understood. status: for the answer."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class _Enough(Exception):
    """No more requests are taken."""


class RequestParser:
    """What one connection says. Once `feed` has returned False, or after `break_off`, it must not be fed any more."""

    __slots__ = (
        "_body",
        "_bytes_max",
        "_chunk_count",
        "_head_bytes",
        "_keeps_alive",
        "_method",
        "_parser",
        "_target",
        "_unsaid_bytes",
        "_version",
        "broken",
        "has_head",
        "headers",
        "is_midway",
        "requests",
        "wants_continue",
    )

    def __init__(self, bytes_max: int) -> None:
        """bytes_max: of a body.

        requests: that have come as a whole, or with a fault. broken: what came after them, if it is none. is_midway: a
        part of one has come. headers: of that one, or of what is broken, by their names in lower case. has_head: its
        head is whole. wants_continue: its client waits for leave to send the body; whoever gives it clears this.
        """
        self._bytes_max = bytes_max
        self.requests: deque[HttpRequest] = deque()
        self.broken: BrokenHead | None = None
        self.is_midway = self.wants_continue = False
        self._parser = httptools.HttpRequestParser(self)
        self._restart()

    def _restart(self) -> None:
        self._target = b""
        self.headers: dict[str, str] = {}
        self._body = bytearray()
        self._head_bytes = self._unsaid_bytes = self._chunk_count = 0
        self.has_head = False

    def close(self) -> None:
        """Let go of what knows this: the parser, and an exception by its traceback. It reads no more."""
        self.broken = None
        del self._parser

    def feed(self, data: bytes) -> bool:
        """Read on; returns whether what follows can be read as well."""
        said = self._said() if self.is_midway else None
        try:
            self._parse(data)
            if said is not None and self.is_midway:
                self._unsaid_bytes = self._unsaid_bytes + len(data) if self._said() == said else 0
                if self._unsaid_bytes > HEAD_BYTES_MAX:
                    raise _large_head()
        except BrokenHead as broken:
            self.broken = broken
        except Failure as fault:
            self.break_off(fault)
        except _Enough:
            pass
        else:
            return True
        return False

    def _said(self) -> tuple[int, int, int]:
        """How much the parser has told. Of a header or a trailer it keeps what has come until it has all of it."""
        return len(self.requests), self._head_bytes, len(self._body)

    def _parse(self, data: bytes) -> None:
        """Raises BrokenHead, and what the methods raise that the parser calls."""
        while data:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]  # No other protocol is spoken here: what follows is HTTP too.
            except httptools.HttpParserCallbackError as error:
                raise error.__context__ or error from None
            except httptools.HttpParserError as error:
                raise self._wrong(error) from None
            if self.has_head:
                self._read_body_anew()

    def _wrong(self, error: httptools.HttpParserError) -> Failure | BrokenHead:
        if self.has_head:
            return Failure(Reason.INVALID_ARGUMENT, f"the body is not as its headers say: {error}")
        return BrokenHead(400, f"this is no HTTP request: {error}")

    def _read_body_anew(self) -> None:
        """httptools takes it that another protocol is spoken from here on: tell it of the body alone."""
        self._parser = httptools.HttpRequestParser(self)
        framing = "transfer-encoding" if "transfer-encoding" in self.headers else "content-length"
        self._parser.feed_data(f"POST / HTTP/1.1\r\n{framing}: {self.headers[framing]}\r\n\r\n".encode("latin-1"))

    def break_off(self, fault: Failure) -> None:
        """The rest of the request will not be read."""
        self._add(fault)

    def _add(self, fault: Failure | None = None, *, is_last: bool = False) -> None:
        self.requests.append(
            HttpRequest(
                method=self._method,
                path=_path_of(self._target.decode("latin-1")),
                headers=self.headers,
                body=bytes(self._body),
                fault=fault,
                is_chunkable=self._version == "1.1",
                keeps_alive=self._keeps_alive and fault is None and not is_last,
            )
        )
        self.is_midway = self.wants_continue = False
        self._restart()

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > HEAD_BYTES_MAX:
            raise _large_head()

    # What the parser calls. With a head that is whole it tells of trailers, which nobody here asks for, or of the same
    # request once more.

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
        self._method = self._parser.get_method().decode("ascii")
        self._version = self._parser.get_http_version()
        self._keeps_alive = self._parser.should_keep_alive()
        _check_framing(self._version, self.headers)
        self.has_head = True
        if int(self.headers.get("content-length", 0)) > self._bytes_max:
            raise too_large(self._bytes_max)
        if "expect" in self.headers and self._version == "1.1":
            self.wants_continue = self.headers["expect"].lower() == "100-continue"

    def on_chunk_header(self) -> None:
        self._chunk_count += 1
        if self._chunk_count > CHUNKS_MAX:
            detail = f"the body comes in more than {CHUNKS_MAX} chunks: send fewer and larger ones"
            raise Failure(Reason.INVALID_ARGUMENT, detail)

    def on_body(self, piece: bytes) -> None:
        if len(self._body) + len(piece) > self._bytes_max:
            raise too_large(self._bytes_max)
        self._body += piece

    def on_message_complete(self) -> None:
        if self._parser.should_upgrade() and self._has_body():
            return  # Its body was passed over: it is read anew.
        is_last = len(self.requests) + 1 >= REQUESTS_AHEAD_MAX
        self._add(is_last=is_last)
        if is_last:
            raise _Enough

    def _has_body(self) -> bool:
        return "transfer-encoding" in self.headers or int(self.headers.get("content-length", 0)) > 0


def _path_of(target: str) -> str:
    """Without the query, and without the host, which a proxy's client names there. Source: RFC 9112, section 3.2.2."""
    path, _, _ = target.partition("?")
    if not path.startswith("/") and "://" in path:
        path = "/" + path.partition("://")[2].partition("/")[2]
    return unquote(path) if "%" in path else path


def _large_head() -> BrokenHead:
    return BrokenHead(431, f"the head of the request has more than {HEAD_BYTES_MAX} bytes: send fewer headers")


def _check_framing(version: str, headers: Mapping[str, str]) -> None:
    """Raises BrokenHead. Source: RFC 9112, sections 2.3 and 6.1."""
    if version not in VERSIONS:
        raise BrokenHead(505, f"HTTP/{version} is not spoken here: use one of {', '.join(VERSIONS)}")
    if (coding := headers.get("transfer-encoding")) is None:
        return
    if version != "1.1":
        raise BrokenHead(400, f"there is no Transfer-Encoding in HTTP/{version}: send a Content-Length")
    if coding.lower() != "chunked":
        raise BrokenHead(501, f"the Transfer-Encoding {quoted(coding)} is not known here: use chunked")


def too_large(bytes_max: int) -> Failure:
    """For a body of more than that."""
    return Failure(Reason.BODY_TOO_LARGE, f"the body is larger than {bytes_max} bytes: send a smaller one")
