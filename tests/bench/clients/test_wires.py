"""A wire tells complete answers from refusals, names anything else, and counts what brought tokens."""

import struct
from collections.abc import Iterator

import pytest

from bench.clients.requests import wire_of
from bench.clients.wires import ANSWERED, REFUSED, FrameCutter, GrpcWire, HttpWire, SseWire, http_message, literal
from services.stubs import inference_pb2

DONE = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
BUSY = b'HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 21\r\n\r\n{"code":"OVERLOADED"}'
MARKER = inference_pb2.GenerateResponse(complete_final=True).SerializeToString()
DATA, HEADERS, RST_STREAM, PING = 0, 1, 3, 6
END_STREAM, ACK = 0x1, 0x1


TOKENS = b'data: {"text":"a"}\n\ndata: {"text":"b"}\n\n'
OK = b"\x88"
UNAVAILABLE = literal(b":status", b"503")
LATER = literal(b"retry-after", b"1")


def outcomes(pieces: Iterator[tuple[str, float]]) -> list[str]:
    return [outcome for outcome, _ in pieces]


def frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream_id) + payload


def test_post_request_states_its_length() -> None:
    assert http_message("/path", b"body").endswith(b"Content-Length: 4\r\n\r\nbody")


@pytest.mark.parametrize(("reply", "outcome"), [(DONE, ANSWERED), (BUSY, REFUSED)])
def test_http_reply_counts_once_its_last_byte_has_arrived(reply: bytes, outcome: str) -> None:
    wire = HttpWire(b"")
    wire.next_request(now=5.0)

    assert list(wire.feed(reply[:-1])) == []
    assert list(wire.feed(reply[-1:])) == [(outcome, 5.0)]


@pytest.mark.parametrize("missing", [b"Retry-After: 1\r\n", b"OVERLOADED"])
def test_http_refusal_without_its_reason_or_retry_delay_is_not_proper(missing: bytes) -> None:
    wire = HttpWire(b"")
    reply = BUSY.replace(missing, b"x" * len(missing) if b"\r\n" not in missing else b"")

    assert outcomes(wire.feed(reply)) not in ([ANSWERED], [REFUSED])


@pytest.mark.parametrize(("last", "outcome"), [(MARKER, ANSWERED), (b"", None)])
def test_grpc_answer_is_complete_only_with_its_marker(last: bytes, outcome: str | None) -> None:
    wire = GrpcWire("/path", b"")
    wire.next_request(now=1.0)
    frames = frame(DATA, 0, 1, b"\0" + len(last).to_bytes(4, "big") + last)
    frames += frame(HEADERS, END_STREAM, 1, b"\x00\x0bgrpc-status\x010")

    (got,) = outcomes(wire.feed(frames))

    assert got == outcome if outcome is not None else got not in (ANSWERED, REFUSED)


def message(content: bytes) -> bytes:
    return b"\0" + len(content).to_bytes(4, "big") + content


def test_grpc_items_are_messages_without_the_marker_however_they_are_cut() -> None:
    wire = GrpcWire("/path", b"")
    wire.next_request(now=1.0)
    body = message(b"one") + message(b"two") + message(MARKER)
    frames = b"".join(frame(DATA, 0, 1, body[at : at + 6]) for at in range(0, len(body), 6))
    frames += frame(HEADERS, END_STREAM, 1, b"\x00\x0bgrpc-status\x010")

    got = [outcome for at in range(len(frames)) for outcome in outcomes(wire.feed(frames[at : at + 1]))]

    assert (got, wire.item_count) == ([ANSWERED], 2)


def test_grpc_answer_that_ends_within_a_message_is_not_complete() -> None:
    wire = GrpcWire("/path", b"")
    wire.next_request(now=1.0)
    frames = frame(DATA, 0, 1, message(MARKER) + b"\0\0") + frame(HEADERS, END_STREAM, 1, literal(b"grpc-status", b"0"))

    assert outcomes(wire.feed(frames)) not in ([ANSWERED], [REFUSED])


@pytest.mark.parametrize(
    ("head", "body", "outcome"),
    [
        (OK, TOKENS + b"data: [DONE]\n\n", ANSWERED),
        (OK, TOKENS, None),
        (UNAVAILABLE + LATER, b'{"code":"OVERLOADED"}', REFUSED),
        (UNAVAILABLE, b'{"code":"OVERLOADED"}', None),
        (UNAVAILABLE + LATER, b"{}", None),
    ],
)
def test_answer_over_http2_needs_its_end_and_a_refusal_its_reason(
    head: bytes, body: bytes, outcome: str | None
) -> None:
    wire = SseWire("/path", b"")
    wire.next_request(now=1.0)

    (got,) = outcomes(wire.feed(frame(HEADERS, 0, 1, head) + frame(DATA, END_STREAM, 1, body)))

    assert got == outcome if outcome is not None else got not in (ANSWERED, REFUSED)


def test_events_are_counted_over_both_versions_of_http() -> None:
    http1, http2 = HttpWire(b""), SseWire("/path", b"")
    http2.next_request(now=1.0)
    http1.next_request(now=1.0)

    list(http1.feed(b"HTTP/1.1 200 OK\r\n\r\n" + TOKENS))
    list(http2.feed(frame(HEADERS, 0, 1, OK) + frame(DATA, 0, 1, TOKENS)))

    assert (http1.item_count, http2.item_count) == (2, 2)


def test_long_answer_over_http1_is_complete_at_its_end_and_leaves_nothing_for_the_next() -> None:
    wire = HttpWire(b"")
    for _ in range(2):
        wire.next_request(now=5.0)
        assert list(wire.feed(DONE.partition(b"e\r\n")[0])) == []
        assert [one for _ in range(100) for one in wire.feed(TOKENS)] == []
        assert list(wire.feed(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")) == [(ANSWERED, 5.0)]


def test_replies_of_concurrent_requests_are_told_apart() -> None:
    wire = GrpcWire("/path", b"")
    wire.next_request(now=1.0)
    wire.next_request(now=2.0)
    end = literal(b"grpc-status", b"0")

    frames = (
        frame(DATA, 0, 3, message(MARKER)) + frame(DATA, 0, 1, message(MARKER)) + frame(HEADERS, END_STREAM, 3, end)
    )

    assert list(wire.feed(frames)) == [(ANSWERED, 2.0)]


def test_frames_are_cut_wherever_the_bytes_are() -> None:
    data = frame(DATA, 0, 1, b"abc") + frame(PING, ACK, 0, b"") + frame(DATA, 1, 3, b"d" * 300)
    for size in (1, 8, 13, len(data)):
        cutter = FrameCutter()
        frames = [one for at in range(0, len(data), size) for one in cutter.feed(data[at : at + size])]
        assert frames == [(DATA, 0, 1, b"abc"), (PING, ACK, 0, b""), (DATA, 1, 3, b"d" * 300)]


@pytest.mark.parametrize(("kind", "wire"), [("http1", HttpWire), ("http2", SseWire), ("grpc", GrpcWire)])
def test_each_kind_has_its_wire(kind: str, wire: type) -> None:
    assert isinstance(wire_of(kind, tokens=5)(), wire)


def test_grpc_wire_acknowledges_a_ping_once() -> None:
    wire = GrpcWire("/path", b"")
    assert wire.reply.startswith(b"PRI * HTTP/2.0")

    assert list(wire.feed(frame(PING, 0, 0, b"12345678"))) == []

    assert wire.reply == frame(PING, ACK, 0, b"12345678")
    assert wire.reply == b""


def test_reset_of_a_stream_that_has_ended_is_ignored() -> None:
    wire = GrpcWire("/path", b"")

    assert list(wire.feed(frame(RST_STREAM, 0, 1, bytes(4)))) == []
