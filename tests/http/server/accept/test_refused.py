"""Connections over HTTP/2 for which there is no room get an answer to their first request, and may send the rest
elsewhere.
"""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise

import grpc
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from services.http.grpc.metadata import head_block, trailers_block
from services.http.h2.wire.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    SETTINGS,
    ErrorCode,
    frame,
)
from services.http.server.accept import acceptor as acceptor_module
from services.http.server.accept import refuser as refuser_module
from services.http.server.accept.probes import FIRST_BYTES_MAX, is_probe
from services.http.server.accept.refused import REFUSED_BODY_BYTES_MAX, REFUSED_FRAMES_MAX
from services.http.server.accept.refuser import Refuser
from services.http.server.config import PROBE_RPC
from services.http.server.messages import HttpRequest, Response
from tests.http.grpc.support import HEADERS as GRPC_HEADERS
from tests.http.grpc.support import message, raw_client, serving_rpcs, stub_of
from tests.http.h2.support import Client, settings
from tests.http.support import run
from tests.support.doubles import run_async

BODY = b"no room"
PATH = "/v1/completions"


class Stage:
    """A refuser, and what it reports."""

    def __init__(self) -> None:
        self.refused: list[tuple[str, str | None]] = []
        self.probes: list[bytes] = []
        self.refuser = Refuser(self, on_probe=self.on_probe, on_room=lambda: None)

    def on_probe(self, sock: socket.socket, received: bytes) -> None:
        self.probes.append(received)
        sock.close()

    def no_room(self, request: HttpRequest) -> Response:
        self.refused.append((request.path, request.headers.get("x-request-id")))
        return Response(BODY, status=503)

    def no_room_for_rpc(self) -> bytes | None:
        return head_block(()) + trailers_block(grpc.StatusCode.UNAVAILABLE, "no room")


@asynccontextmanager
async def refused(stage: Stage, *, window: int = 65_535) -> AsyncIterator[Client]:
    """A client whose connection is refused. It has sent the preface and its settings."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    stage.refuser.refuse(theirs)
    reader, writer = await asyncio.open_connection(sock=ours)
    client = Client(reader, writer)
    client.send(PREFACE, settings(window=window))
    try:
        yield client
    finally:
        writer.close()
        stage.refuser.close()


def test_client_hears_from_the_server_before_it_sends_a_request() -> None:
    """Clients of gRPC wait for it."""

    async def test() -> None:
        async with refused(Stage()) as client:
            await client.until(lambda: [one for one in client.seen if one.kind == SETTINGS])

    run_async(test())


@pytest.mark.parametrize("path", [PATH, "/live", PROBE_RPC], ids=["request", "not a GET", "without an end"])
def test_request_is_answered_with_503_and_the_next_one_is_not(path: str) -> None:
    async def test() -> None:
        stage = Stage()
        async with refused(stage) as client:
            headers = {"x-request-id": "one"}
            if path == PROBE_RPC:
                first = client.open(path, headers, ends=False)
                client.send(frame(DATA, 0, first, bytes(16_000)) * (REFUSED_BODY_BYTES_MAX // 16_000 + 1))
            else:
                first = client.post(path, b"{}", headers)
            client.get("/second")

            answer = await client.answer(first)
            assert await client.end() is ErrorCode.NO_ERROR

        assert (answer.status, answer.body) == (503, BODY)
        assert answer.headers["content-length"] == str(len(BODY))
        assert client.goaways == [(first, ErrorCode.NO_ERROR)], "the second may be sent elsewhere"
        assert stage.refused == [(path, "one")]
        assert (answer.reset is ErrorCode.NO_ERROR) == (path == PROBE_RPC)

    run_async(test())


def test_rpc_is_answered_with_a_status() -> None:
    async def test() -> None:
        stage = Stage()
        async with refused(stage) as client:
            answer = await client.answer(client.post("/a.B/C", message(b""), GRPC_HEADERS))
            await client.end()

        assert answer.headers["grpc-status"] == str(grpc.StatusCode.UNAVAILABLE.value[0])
        assert stage.refused == [("/a.B/C", None)], "it is counted"

    run_async(test())


def test_body_that_the_client_takes_not_is_left_out() -> None:
    async def test() -> None:
        async with refused(Stage(), window=1) as client:
            answer = await client.answer(client.get(PATH))
            await client.end()

        assert answer.headers["content-length"] == "0"
        assert answer.body == b""

    run_async(test())


@pytest.mark.parametrize("has_head", [False, True], ids=["silent", "half a request"])
def test_client_that_sends_nothing_more_is_told_in_time(has_head: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refuser_module, "REFUSED_S_MAX", 0.02)

    async def test() -> None:
        async with refused(Stage()) as client:
            if has_head:
                client.send(frame(HEADERS, 0, 1, client.block(PATH)))
            assert await client.end() is ErrorCode.NO_ERROR
            assert client.goaways == [(0, ErrorCode.NO_ERROR)]

    run_async(test())


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff\xff\xff\xff"), ErrorCode.COMPRESSION_ERROR),
        (frame(HEADERS, END_HEADERS, 1, b"\x82"), ErrorCode.PROTOCOL_ERROR),
        (b"\xff" * 9, ErrorCode.FRAME_SIZE_ERROR),
        (settings() * REFUSED_FRAMES_MAX, ErrorCode.NO_ERROR),
    ],
    ids=["fields", "no path", "frame", "flood"],
)
def test_client_that_breaks_the_protocol_is_told_so(sent: bytes, code: ErrorCode) -> None:
    async def test() -> None:
        async with refused(Stage()) as client:
            client.send(sent)
            assert await client.end() is code

    run_async(test())


def session(path: str, headers: dict[str, str], method: str, content: bytes) -> bytes:
    client = Client(None, None)  # type: ignore[arg-type]  # It only encodes.
    head = frame(HEADERS, END_HEADERS | (0 if content else END_STREAM), 1, client.block(path, headers, method))
    return PREFACE + settings() + head + (frame(DATA, END_STREAM, 1, content) if content else b"")


@hypothesis_settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 200), max_size=6), st.booleans())
def test_health_check_is_passed_on_with_all_its_bytes_however_they_come(cuts: list[int], is_rpc: bool) -> None:
    path, headers, method = (PROBE_RPC, GRPC_HEADERS, "POST") if is_rpc else ("/live", {}, "GET")
    data = session(path, headers, method, message(b"") if is_rpc else b"")

    async def test() -> None:
        stage = Stage()
        ours, theirs = socket.socketpair()
        with ours:
            stage.refuser.refuse(theirs)
            bounds = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
            for start, end in pairwise(bounds):
                ours.sendall(data[start:end])
                stage.refuser._read(theirs)

        assert stage.probes == [data]
        assert stage.refused == []
        stage.refuser.close()

    run_async(test())


@pytest.mark.parametrize("path", ["/live", "/health"])
def test_health_check_is_recognised_before_its_connection_is_set_up(path: str) -> None:
    assert is_probe(session(path, {}, "GET", b"")[:FIRST_BYTES_MAX])
    assert not is_probe(session(PATH, {}, "GET", b""))
    assert not is_probe(PREFACE)


def test_real_client_is_refused_with_unavailable_and_a_health_check_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        async with serving_rpcs() as serving, raw_client(serving) as first:
            await first.until(lambda: first.seen)
            monkeypatch.setattr(acceptor_module, "is_reserved", lambda fileno: True)

            async with stub_of(serving) as stub:
                with pytest.raises(grpc.aio.AioRpcError, match="no room") as caught:
                    await stub.empty(serving.service.types["Empty"]())
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

            async with grpc.aio.insecure_channel(serving.address) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await channel.unary_unary(PROBE_RPC)(b"")  # type: ignore[arg-type]
                assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED, "the service that is served has none"

            async with raw_client(serving) as probe:
                assert (await probe.answer(probe.get("/live"))).status == 404, "the application has none"
                assert await probe.end() is ErrorCode.NO_ERROR

    run(test)
