"""The bytes of a client's requests and of the replies to them, over HTTP/1.1 and over gRPC."""

import struct
from collections.abc import Iterator
from typing import Protocol

from services.stubs import inference_pb2

SHOWN_BYTES = 300
ANSWERED, REFUSED = "answered", "refused"


class Wire(Protocol):
    """The protocol of one connection, without its socket."""

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
    """HTTP/1.1: one request at a time, streamed or not."""

    reply = b""

    def __init__(self, message: bytes) -> None:
        self._message = message
        self._received = b""
        self._asked_at = 0.0

    def next_request(self, now: float) -> bytes:
        self._asked_at = now
        return self._message

    def feed(self, data: bytes) -> Iterator[tuple[str, float]]:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found or not _is_complete(head, body):
            return
        self._received = b""
        yield _http_outcome(head, body), self._asked_at


def _is_complete(head: bytes, body: bytes) -> bool:
    _, is_sized, length = head.lower().partition(b"content-length: ")
    return len(body) >= int(length.split(b"\r\n")[0]) if is_sized else body.endswith(b"0\r\n\r\n")


def _http_outcome(head: bytes, body: bytes) -> str:
    """Classify a response. A refusal needs its status, its reason and a retry delay; an answer needs its end."""
    if head.startswith(b"HTTP/1.1 200") and (b"[DONE]" in body or b'"finish_reason":"length"' in body):
        return ANSWERED
    has_reason = b'"OVERLOADED"' in body or b'"WORKER_AT_CAPACITY"' in body
    if head.startswith(b"HTTP/1.1 503") and has_reason and b"Retry-After: " in head:
        return REFUSED
    return f"{head[:SHOWN_BYTES]!r} {body[:SHOWN_BYTES]!r}"


def http_message(path: str, body: bytes) -> bytes:
    """Return a POST request as it goes over the wire."""
    return b"POST %b HTTP/1.1\r\nHost: storm\r\nContent-Length: %d\r\n\r\n%b" % (path.encode(), len(body), body)


_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS = 0x1, 0x1, 0x4
_WINDOW_BYTES = 2**31 - 1
_HEADER_TABLE_SIZE, _INITIAL_WINDOW_SIZE = 1, 4
_MARKER = inference_pb2.GenerateResponse(complete_final=True).SerializeToString()


def _frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    """Return an HTTP/2 frame. Source: RFC 9113, 4.1."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream_id) + payload


def _literal(name: bytes, value: bytes) -> bytes:
    """Return a header field without compression. Source: RFC 7541, 6.2.2."""
    return bytes([0, len(name)]) + name + bytes([len(value)]) + value


class GrpcWire:
    """gRPC: any number of concurrent calls. Turns off HPACK's dynamic table, so that a status is literal."""

    def __init__(self, path: str, message: bytes) -> None:
        fields = ((b":method", b"POST"), (b":scheme", b"http"), (b":path", path.encode()), (b":authority", b"storm"))
        more = ((b"content-type", b"application/grpc"), (b"te", b"trailers"))
        self._headers = b"".join(_literal(*one) for one in (*fields, *more))
        self._data = struct.pack(">BI", 0, len(message)) + message
        settings = struct.pack(">HIHI", _HEADER_TABLE_SIZE, 0, _INITIAL_WINDOW_SIZE, _WINDOW_BYTES)
        window = struct.pack(">I", _WINDOW_BYTES - 65_535)
        greeting = _frame(_SETTINGS, 0, 0, settings) + _frame(_WINDOW_UPDATE, 0, 0, window)
        self._reply = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + greeting
        self._next_id = 1
        self._asked_at: dict[int, float] = {}
        self._received: dict[int, bytes] = {}
        self._unparsed = b""

    @property
    def reply(self) -> bytes:
        reply, self._reply = self._reply, b""
        return reply

    def next_request(self, now: float) -> bytes:
        stream_id, self._next_id = self._next_id, self._next_id + 2
        self._asked_at[stream_id], self._received[stream_id] = now, b""
        headers = _frame(_HEADERS, _END_HEADERS, stream_id, self._headers)
        return self.reply + headers + _frame(_DATA, _END_STREAM, stream_id, self._data)

    def feed(self, data: bytes) -> Iterator[tuple[str, float]]:
        self._unparsed += data
        while len(self._unparsed) >= 9:
            length = int.from_bytes(self._unparsed[:3], "big")
            if len(self._unparsed) < 9 + length:
                return
            kind, flags, stream_id = struct.unpack(">BBI", self._unparsed[3:9])
            payload, self._unparsed = self._unparsed[9 : 9 + length], self._unparsed[9 + length :]
            if self._on_frame(kind, flags, stream_id, payload):
                yield _grpc_outcome(self._received.pop(stream_id), payload), self._asked_at.pop(stream_id)

    def _on_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> bool:
        """Handle one frame. Returns whether it ends a call."""
        assert kind != _GOAWAY, payload
        if kind in (_SETTINGS, _PING) and not flags & _ACK:
            self._reply += _frame(kind, _ACK, 0, payload if kind == _PING else b"")
        if kind == _DATA and payload:
            self._received[stream_id] = payload
        ends = kind == _RST_STREAM or (kind == _HEADERS and bool(flags & _END_STREAM))
        return ends and stream_id in self._asked_at  # A server may reset a stream that it has ended.


def _grpc_outcome(last: bytes, trailers: bytes) -> str:
    if b"\x0bgrpc-status\x010" in trailers and last.endswith(_MARKER):
        return ANSWERED
    has_details = b"\x17grpc-status-details-bin" in trailers
    return REFUSED if b"\x0bgrpc-status\x018" in trailers and has_details else f"{last!r} {trailers[:SHOWN_BYTES]!r}"
