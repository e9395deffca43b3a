"""A wire tells complete answers from refusals, and names anything else."""

import struct
from collections.abc import Iterator

import pytest

from bench.clients.wires import ANSWERED, REFUSED, GrpcWire, HttpWire, http_message
from services.stubs import inference_pb2

DONE = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
BUSY = b'HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 21\r\n\r\n{"code":"OVERLOADED"}'
MARKER = inference_pb2.GenerateResponse(complete_final=True).SerializeToString()
DATA, HEADERS, RST_STREAM, PING = 0, 1, 3, 6
END_STREAM, ACK = 0x1, 0x1


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


def test_grpc_wire_acknowledges_a_ping_once() -> None:
    wire = GrpcWire("/path", b"")
    assert wire.reply.startswith(b"PRI * HTTP/2.0")

    assert list(wire.feed(frame(PING, 0, 0, b"12345678"))) == []

    assert wire.reply == frame(PING, ACK, 0, b"12345678")
    assert wire.reply == b""


def test_reset_of_a_stream_that_has_ended_is_ignored() -> None:
    wire = GrpcWire("/path", b"")

    assert list(wire.feed(frame(RST_STREAM, 0, 1, bytes(4)))) == []
