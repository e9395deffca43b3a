"""Cuts what comes from a client into requests.

The bytes are read by httptools, whose parser is that of Node.js, in its strict setting: what two servers could take for
different requests is an error.
"""

from collections import deque
from urllib.parse import unquote

import httptools

from services.errors import Failure, Reason
from services.frontend.http.messages import HttpRequest

HEAD_BYTES_MAX = 64 * 1024
"""Of the target and all headers of one request."""
REQUESTS_AHEAD_MAX = 64
"""That come in one read. After the last of them the connection is closed; its client has to send the rest again."""


class BrokenHead(Exception):
    """What came is no request, in a sentence; nothing after it can be understood. status: for the answer."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class _Enough(Exception):
    """No more requests are taken."""


class RequestReader:
    """What one connection says. Once `feed` has returned False, or `break_off` was called, it must not be fed any more.

    has_head: the head of the request that is coming is whole.
    """

    __slots__ = (
        "_body",
        "_body_bytes",
        "_bytes_max",
        "_head_bytes",
        "_headers",
        "_parser",
        "_target",
        "_unsaid_bytes",
        "has_head",
        "is_midway",
        "requests",
        "wants_continue",
    )

    def __init__(self, bytes_max: int) -> None:
        """bytes_max: of a body.

        requests: that have come as a whole, or with a fault. is_midway: a part of one has come. wants_continue: its
        client waits for leave to send the body; whoever gives it clears this.
        """
        self._bytes_max = bytes_max
        self.requests: deque[HttpRequest] = deque()
        self.is_midway = self.wants_continue = False
        self._parser = httptools.HttpRequestParser(self)
        self._restart()

    def _restart(self) -> None:
        self._target = b""
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._body_bytes = self._head_bytes = self._unsaid_bytes = 0
        self.has_head = False

    def feed(self, data: bytes) -> bool:
        """Read on; returns whether what follows can be read as well. Raises BrokenHead."""
        if self.is_midway and not self.has_head:
            self._unsaid_bytes += len(data)  # The parser says nothing of a header before all of it has come.
            self._check_head(self._unsaid_bytes)
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            self._on_error(error)
            return False
        return True

    def _on_error(self, error: httptools.HttpParserError) -> None:
        match error.__context__:
            case BrokenHead() as broken:
                raise broken from None
            case Failure() as fault:
                self.break_off(fault)
            case _Enough():
                pass
            case _ if self.has_head:
                detail = f"the body is not as its headers say: {error}"
                self.break_off(Failure(Reason.INVALID_ARGUMENT, detail))
            case _:
                raise BrokenHead(400, f"this is no HTTP request: {error}") from None

    def _parse(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:  # No other protocol is spoken here: what follows is HTTP too.
            if rest := data[upgrade.args[0] :]:
                self._parse(rest)

    def close(self) -> None:
        """Let go of the parser. It reads no more."""
        del self._parser

    def break_off(self, fault: Failure) -> None:
        """The rest of the request will not be read."""
        self._add(fault)

    def _add(self, fault: Failure | None = None, *, is_last: bool = False) -> None:
        parser = self._parser
        path, _, _ = self._target.decode("latin-1").partition("?")
        self.requests.append(
            HttpRequest(
                method=parser.get_method().decode("ascii"),
                path=unquote(path) if "%" in path else path,
                headers=self._headers,
                body=b"".join(self._body),
                fault=fault,
                is_chunkable=parser.get_http_version() == "1.1",
                keeps_alive=parser.should_keep_alive() and fault is None and not is_last,
            )
        )
        self.is_midway = False
        self._restart()

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        self._check_head(self._head_bytes)

    @staticmethod
    def _check_head(size: int) -> None:
        if size > HEAD_BYTES_MAX:
            raise BrokenHead(431, f"the head of the request has more than {HEAD_BYTES_MAX} bytes: send fewer headers")

    # What the parser calls

    def on_message_begin(self) -> None:
        self.is_midway = True

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value))
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        given = self._headers.get(key)
        self._headers[key] = text if given is None else f"{given}, {text}"  # RFC 9110, section 5.3.

    def on_headers_complete(self) -> None:
        self.has_head = True
        if int(self._headers.get("content-length", 0)) > self._bytes_max:
            raise too_large(self._bytes_max)
        if "expect" in self._headers:
            self.wants_continue = self._headers["expect"].lower() == "100-continue"

    def on_body(self, piece: bytes) -> None:
        self._body_bytes += len(piece)
        if self._body_bytes > self._bytes_max:
            raise too_large(self._bytes_max)
        self._body.append(piece)

    def on_message_complete(self) -> None:
        self.wants_continue = False
        is_last = len(self.requests) + 1 >= REQUESTS_AHEAD_MAX
        self._add(is_last=is_last)
        if is_last:
            raise _Enough


def too_large(bytes_max: int) -> Failure:
    """For a body of more than that."""
    return Failure(Reason.BODY_TOO_LARGE, f"the body is larger than {bytes_max} bytes: send a smaller one")
