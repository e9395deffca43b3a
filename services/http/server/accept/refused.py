"""The requests of connections that are refused: how they arrive, and their answers, over either version of HTTP."""

from collections.abc import Mapping
from typing import Protocol

from services.http.h1.parser import RequestParser
from services.http.h2.flow_control import WINDOW_DEFAULT
from services.http.h2.settings import INITIAL_WINDOW_SIZE, own_settings, settings_in
from services.http.h2.wire.fields import FieldDecoder, RequestHead, encode_fields, encode_status, head_of
from services.http.h2.wire.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_STREAM,
    HEADERS,
    PREFACE,
    SETTINGS,
    ErrorCode,
    Frame,
    FrameReader,
    H2Error,
    StreamError,
    frame,
    goaway,
    headers_frames,
    rst_stream,
)
from services.http.h2.wire.header_block import HeaderBlock
from services.http.server.config import GRPC, PROBE_PATHS, PROBE_RPC
from services.http.server.messages import HttpRequest, Response

REFUSED_BODY_BYTES_MAX = 64 * 1024
"""A longer body is not waited for. Clients that are still sending may miss the answer."""
REFUSED_FRAMES_MAX = 64
"""Frames of a refused connection over HTTP/2 that are read until it is answered without a request."""


class Answers(Protocol):
    """Makes the answers, and counts them."""

    def no_room(self, request: HttpRequest) -> Response:
        """The response to a request. Its headers are those that have come; `path`: "" if unknown."""
        ...

    def no_room_for_rpc(self) -> bytes | None:
        """The block of header fields that answers an rpc; None: no rpcs are served."""
        ...


class H1Arrival:
    """A request over HTTP/1.1. The bounds of the parser bound it.

    `greeting`: what is sent before it has come. `is_probe`: it has come whole, and is a health check.
    """

    greeting = b""

    def __init__(self) -> None:
        self._parser = RequestParser(REFUSED_BODY_BYTES_MAX)

    @property
    def is_probe(self) -> bool:
        requests = self._parser.requests
        return bool(requests) and requests[0].method == "GET" and requests[0].path in PROBE_PATHS

    def feed(self, data: bytes) -> bool:
        """Add what has come. Returns whether the request need not be waited for any longer."""
        is_over = not self._parser.feed(data) or self._parser.wants_continue
        return is_over or bool(self._parser.requests)

    def answer(self, answers: Answers) -> bytes:
        """The answer to what has come."""
        parser = self._parser
        request = parser.requests[0] if parser.requests else None
        path, headers = ("", parser.headers) if request is None else (request.path, request.headers)
        self.close()
        refused = _refused(path, headers)
        return answers.no_room(refused).encode(refused, is_last=True)

    def close(self) -> None:
        """Free the parser."""
        self._parser.close()


class H2Arrival:
    """The first request over HTTP/2. Further ones may be sent again elsewhere: GOAWAY says so. See `H1Arrival`."""

    greeting = own_settings()
    """Sent at once: clients of gRPC wait for it before they send a request."""

    def __init__(self) -> None:
        self._reader = FrameReader()
        self._fields = FieldDecoder()
        self._block: HeaderBlock | None = None
        self._head: RequestHead | None = None
        self._stream_id = self._body_size = self._frame_count = 0
        self._window = WINDOW_DEFAULT
        self._has_settings = self._is_whole = False
        self._fault = ErrorCode.NO_ERROR

    @property
    def is_probe(self) -> bool:
        head = self._head
        return (
            self._is_whole
            and head is not None
            and ((head.method == "GET" and head.path in PROBE_PATHS) or head.path == PROBE_RPC)
        )

    def feed(self, data: bytes) -> bool:
        self._reader.feed(data)
        try:
            while not self._is_over and (one := self._reader.next()) is not None:
                self._frame_count += 1
                self._add(one)
        except (H2Error, StreamError) as error:
            self._fault = error.code
        return self._is_over

    @property
    def _is_over(self) -> bool:
        return (
            self._is_whole
            or self._fault is not ErrorCode.NO_ERROR
            or self._body_size > REFUSED_BODY_BYTES_MAX
            or self._frame_count >= REFUSED_FRAMES_MAX
        )

    def _add(self, one: Frame) -> None:
        """Raises H2Error and StreamError."""
        if one.kind == SETTINGS and not one.flags & ACK:
            self._has_settings = True
            self._window = settings_in(one.payload).get(INITIAL_WINDOW_SIZE, self._window)
        elif one.kind == HEADERS and self._head is None:
            self._block = HeaderBlock(one)
            self._use_block(self._block)
        elif one.kind == CONTINUATION and self._block is not None:
            self._block.add(one)
            self._use_block(self._block)
        elif one.stream_id == self._stream_id and one.kind in (DATA, HEADERS):
            self._body_size += len(one.payload)
            self._is_whole = bool(one.flags & END_STREAM)

    def _use_block(self, block: HeaderBlock) -> None:
        if not block.is_complete:
            return
        self._block = None
        self._stream_id = block.stream_id
        self._head = head_of(self._fields.decode(block.data))
        self._is_whole = block.is_last

    def answer(self, answers: Answers) -> bytes:
        settings = frame(SETTINGS, ACK, 0) if self._has_settings else b""
        head = self._head
        refused = _refused("" if head is None else head.path, {} if head is None else head.headers)
        response = answers.no_room(refused)
        if head is None:
            return settings + goaway(0, self._fault)
        answer = self._answer_to(head, refused, response, answers.no_room_for_rpc())
        rest = b"" if self._is_whole else rst_stream(self._stream_id, ErrorCode.NO_ERROR)  # RFC 9113, section 8.1.
        return settings + answer + rest + goaway(self._stream_id, self._fault)

    def close(self) -> None:
        """Nothing to free."""

    def _answer_to(self, head: RequestHead, refused: HttpRequest, response: Response, rpc: bytes | None) -> bytes:
        if rpc is not None and GRPC.match(head.headers.get("content-type", "")):
            return headers_frames(self._stream_id, rpc, is_last=True)
        if len(response.body) > self._window or head.method == "HEAD":
            response.body = b""
        block = encode_status(response.status) + encode_fields(response.fields(refused).items())
        fields = headers_frames(self._stream_id, block, is_last=not response.body)
        return fields + (frame(DATA, END_STREAM, self._stream_id, response.body) if response.body else b"")


def _refused(path: str, headers: Mapping[str, str]) -> HttpRequest:
    return HttpRequest(method="", path=path, headers=headers, keeps_alive=False)


def arrival_of(first: bytes) -> H1Arrival | H2Arrival | None:
    """How a request that begins with these bytes arrives, which must be fed; None: they do not say it yet.

    That of HTTP/2 is fed without the preface.
    """
    if first.startswith(PREFACE):
        return H2Arrival()
    return None if PREFACE.startswith(first) else H1Arrival()
