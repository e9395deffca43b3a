"""The bytes of a client's requests and of the replies to them, over HTTP/1.1, over HTTP/2 and over gRPC.

All that speak HTTP/2 share one reader, so that none of their columns has a cheaper client than another.
"""

import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Protocol

from services.stubs import inference_pb2

SHOWN_BYTES = 300
ANSWERED, REFUSED = "answered", "refused"
EVENT = b"data: {"
_DONE = b"data: [DONE]"
_REASONS = (b'"OVERLOADED"', b'"WORKER_AT_CAPACITY"')


class Wire(Protocol):
    """The protocol of one connection, without its socket. `item_count`: events or messages with tokens so far."""

    item_count: int

    def next_request(self, now: float) -> bytes:
        """Return the bytes of one more request."""
        ...

    def feed(self, data: bytes) -> Iterator[tuple[str, float]]:
        """Yield (outcome, when it was sent) for each request that these received bytes end."""
        ...

    @property
    def reply(self) -> bytes:
        """Return the bytes that the protocol itself has to send, such as settings; each is returned once."""
        ...


class HttpWire:
    """HTTP/1.1: one request at a time, streamed or not. Of a streamed answer only the end is kept."""

    reply = b""

    def __init__(self, message: bytes) -> None:
        self.item_count = 0
        self._message = message
        self._head = self._body = b""
        self._size: int | None = None
        self._asked_at = 0.0

    def next_request(self, now: float) -> bytes:
        self._asked_at = now
        return self._message

    def feed(self, data: bytes) -> Iterator[tuple[str, float]]:
        self.item_count += data.count(EVENT)
        self._body += data
        if not self._head:
            head, is_whole, body = self._body.partition(b"\r\n\r\n")
            if not is_whole:
                return
            self._head, self._body, self._size = head, body, _content_length(head)
        if self._size is None:
            self._body = self._body[-SHOWN_BYTES:]
        if self._body.endswith(b"0\r\n\r\n") if self._size is None else len(self._body) >= self._size:
            head, body = self._head, self._body
            self._head = self._body = b""
            yield _http_outcome(head, body), self._asked_at


def _content_length(head: bytes) -> int | None:
    _, is_given, length = head.lower().partition(b"content-length: ")
    return int(length.split(b"\r\n")[0]) if is_given else None


def _http_outcome(head: bytes, body: bytes) -> str:
    """Classify a response. A refusal needs its status, its reason and a retry delay; an answer needs its end."""
    if head.startswith(b"HTTP/1.1 200") and (_DONE in body or b'"finish_reason":"length"' in body):
        return ANSWERED
    if head.startswith(b"HTTP/1.1 503") and _has_reason(body) and b"Retry-After: " in head:
        return REFUSED
    return f"{head[:SHOWN_BYTES]!r} {body[:SHOWN_BYTES]!r}"


def _has_reason(body: bytes) -> bool:
    return any(reason in body for reason in _REASONS)


def http_message(path: str, body: bytes, headers: str = "") -> bytes:
    """Return a POST request as it goes over the wire. `headers`: further lines."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 0x1, 0x1, 0x4
_WINDOW_BYTES = 2**31 - 1
_HEADER_TABLE_SIZE, _INITIAL_WINDOW_SIZE = 1, 4
_FRAME_HEAD = struct.Struct(">HBBBI")
_FRAME_HEAD_BYTES, _PREFIX_BYTES = 9, 5
_MARKER = inference_pb2.GenerateResponse(complete_final=True).SerializeToString()


def frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    """Return an HTTP/2 frame. Source: RFC 9113, 4.1."""
    size = len(payload)
    return _FRAME_HEAD.pack(size >> 8, size & 0xFF, kind, flags, stream_id) + payload


def literal(name: bytes, value: bytes) -> bytes:
    """Return a header field without compression. Source: RFC 7541, 6.2.2."""
    return bytes([0, len(name)]) + name + bytes([len(value)]) + value


def greeting() -> bytes:
    """Return how a client begins: with windows that never close, and without HPACK's dynamic table, so that what a
    server sends is literal."""
    settings = struct.pack(">HIHI", _HEADER_TABLE_SIZE, 0, _INITIAL_WINDOW_SIZE, _WINDOW_BYTES)
    window = struct.pack(">I", _WINDOW_BYTES - 65_535)
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0, settings) + frame(WINDOW_UPDATE, 0, 0, window)


def post_head(path: str, fields: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return the header block of a POST request."""
    pseudo = ((b":method", b"POST"), (b":scheme", b"http"), (b":path", path.encode()), (b":authority", b"localhost"))
    return b"".join(literal(*one) for one in (*pseudo, *fields))


def grpc_request_parts(path: str, message: bytes) -> tuple[bytes, bytes]:
    """Return the header block and the content of an rpc."""
    head = post_head(path, ((b"content-type", b"application/grpc"), (b"te", b"trailers")))
    return head, struct.pack(">BI", 0, len(message)) + message


class FrameCutter:
    """Cuts received bytes into frames."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[tuple[int, int, int, bytes]]:
        """Return (type, flags, stream id, payload) of each frame that has arrived whole."""
        if self._rest:
            data = self._rest + data
        frames, at, end = [], 0, len(data)
        while end - at >= _FRAME_HEAD_BYTES:
            upper, lowest, kind, flags, stream_id = _FRAME_HEAD.unpack_from(data, at)
            payload_at = at + _FRAME_HEAD_BYTES
            frame_end = payload_at + (upper << 8 | lowest)
            if frame_end > end:
                break
            frames.append((kind, flags, stream_id, data[payload_at:frame_end]))
            at = frame_end
        self._rest = data[at:]
        return frames


def answer_to(kind: int, flags: int, payload: bytes) -> bytes:
    """Return what a client has to say to a frame: it acknowledges SETTINGS and PING."""
    if kind not in (SETTINGS, PING) or flags & ACK:
        return b""
    return frame(kind, ACK, 0, payload if kind == PING else b"")


class _Asked:
    """One request. `head`: its first header block. `rest`: content that is not used yet. `last`: that which was."""

    __slots__ = ("at", "head", "last", "rest")

    def __init__(self, at: float) -> None:
        self.at = at
        self.head = self.rest = self.last = b""


class H2Wire(ABC):
    """HTTP/2: any number of concurrent requests."""

    def __init__(self, head: bytes, content: bytes) -> None:
        """`head`: the header block of each request."""
        self.item_count = 0
        self._head, self._content = head, content
        self._reply = greeting()
        self._next_id = 1
        self._asked: dict[int, _Asked] = {}
        self._cutter = FrameCutter()

    @property
    def reply(self) -> bytes:
        reply, self._reply = self._reply, b""
        return reply

    def next_request(self, now: float) -> bytes:
        stream_id, self._next_id = self._next_id, self._next_id + 2
        self._asked[stream_id] = _Asked(now)
        headers = frame(HEADERS, END_HEADERS, stream_id, self._head)
        return self.reply + headers + frame(DATA, END_STREAM, stream_id, self._content)

    def feed(self, data: bytes) -> Iterator[tuple[str, float]]:
        for kind, flags, stream_id, payload in self._cutter.feed(data):
            asked = self._asked.get(stream_id)
            if asked is None:  # The frame is of the connection, or of a stream that has ended and may be reset.
                assert kind != GOAWAY, payload
                self._reply += answer_to(kind, flags, payload)
            elif kind == DATA:
                self._on_content(asked, payload)
            elif kind == HEADERS:
                asked.head = asked.head or payload
            if asked is not None and (kind == RST_STREAM or (flags & END_STREAM and kind in (DATA, HEADERS))):
                del self._asked[stream_id]
                yield self._outcome(asked, payload if kind == HEADERS else b""), asked.at

    @abstractmethod
    def _on_content(self, asked: _Asked, payload: bytes) -> None:
        """Count the items of a DATA frame."""

    @abstractmethod
    def _outcome(self, asked: _Asked, trailers: bytes) -> str:
        """Classify a reply that has ended. `trailers`: its last header block, if that ended it."""


def cut_messages(data: bytes) -> tuple[list[bytes], bytes]:
    """Return the whole messages of gRPC in what has arrived, without their prefixes, and the rest."""
    messages, at, end = [], 0, len(data)
    while end - at >= _PREFIX_BYTES:
        message_end = at + _PREFIX_BYTES + int.from_bytes(data[at + 1 : at + _PREFIX_BYTES], "big")
        if message_end > end:
            break
        messages.append(data[at + _PREFIX_BYTES : message_end])
        at = message_end
    return messages, data[at:]


class GrpcWire(H2Wire):
    """gRPC: each message but the marker at the end is an item."""

    def __init__(self, path: str, message: bytes) -> None:
        super().__init__(*grpc_request_parts(path, message))

    def _on_content(self, asked: _Asked, payload: bytes) -> None:
        messages, asked.rest = cut_messages(asked.rest + payload if asked.rest else payload)
        if messages:
            asked.last = messages[-1]
            self.item_count += len(messages) - messages.count(_MARKER)

    def _outcome(self, asked: _Asked, trailers: bytes) -> str:
        if b"\x0bgrpc-status\x010" in trailers and asked.last == _MARKER and not asked.rest:
            return ANSWERED
        has_details = b"\x17grpc-status-details-bin" in trailers
        is_refusal = b"\x0bgrpc-status\x018" in trailers and has_details
        return REFUSED if is_refusal else f"{asked.last!r} {trailers[:SHOWN_BYTES]!r}"


class SseWire(H2Wire):
    """The OpenAI API over HTTP/2: each event with a token is an item."""

    def __init__(self, path: str, body: bytes) -> None:
        super().__init__(post_head(path, ((b"content-type", b"application/json"),)), body)

    def _on_content(self, asked: _Asked, payload: bytes) -> None:
        self.item_count += payload.count(EVENT)
        asked.last = (asked.last + payload)[-SHOWN_BYTES:]

    def _outcome(self, asked: _Asked, trailers: bytes) -> str:
        if asked.head.startswith(_STATUS_200) and _DONE in asked.last:
            return ANSWERED
        is_refusal = (
            b"\x07:status\x03503" in asked.head and b"\x0bretry-after" in asked.head and _has_reason(asked.last)
        )
        return REFUSED if is_refusal else f"{asked.head[:SHOWN_BYTES]!r} {asked.last!r}"


_STATUS_200 = b"\x88"
"""`:status: 200` has an index of its own. Source: RFC 7541, appendix A."""
