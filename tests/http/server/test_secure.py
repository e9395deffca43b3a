"""Over TLS the server is the same server: both versions of HTTP, streams, slow clients, and the end."""

import asyncio
import socket
import ssl
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from structlog.testing import capture_logs

from services.core.errors import Reason
from services.core.flow.client_flow import ClientBounds
from services.http.h2.wire.frames import PREFACE
from services.http.server.config import HttpConfig
from services.http.server.secure import NO_ROOM
from services.tls.watch import ServerPair, WatchedCertificate, watched_pair
from tests.http.server.accept.test_acceptor import descriptors_left
from tests.http.support import Script, run, serving
from tests.support.clock import WAIT_S
from tests.tls.support import Certificates, connected, serial_of, until

COMPLETIONS = "/v1/completions"
GET = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"
STREAMED = {"model": "org/tiny", "prompt": "x", "stream": True}


@pytest.fixture
def made(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


@pytest.fixture
def pair(made: Certificates) -> WatchedCertificate[ServerPair]:
    return watched_pair(made.pair(), lambda: 0.0)


@pytest.mark.parametrize("is_http2", [False, True], ids=["HTTP/1.1", "HTTP/2"])
def test_client_chooses_its_version_by_alpn(
    made: Certificates, pair: WatchedCertificate[ServerPair], is_http2: bool
) -> None:
    async def test() -> None:
        context = made.client_context()
        async with (
            serving(Script("Hello ", "world"), tls=pair) as server,
            httpx.AsyncClient(
                base_url=f"https://localhost:{server.port}", http2=is_http2, verify=context, trust_env=False
            ) as client,
        ):
            answer = await client.post(COMPLETIONS, json=STREAMED, timeout=WAIT_S)

            assert answer.http_version == ("HTTP/2" if is_http2 else "HTTP/1.1")
            assert answer.status_code == 200
            assert '"Hello ' in answer.text
            assert '"world' in answer.text
            assert answer.text.endswith("data: [DONE]\n\n")

    run(test)


@pytest.mark.parametrize(
    ("offered", "sent", "answer"),
    [
        (["h2"], GET, b""),
        (["http/1.1"], PREFACE, b"HTTP/1.1 400 "),
        ([], GET, b"HTTP/1.1 200 "),
        ([], PREFACE, b"\0\0"),
        (["h3"], GET, b"HTTP/1.1 200 "),
    ],
    ids=["HTTP/1.1 after h2", "HTTP/2 after http/1.1", "HTTP/1.1 without ALPN", "HTTP/2 without ALPN", "only h3"],
)
def test_version_is_that_which_was_agreed_on(
    made: Certificates, pair: WatchedCertificate[ServerPair], offered: list[str], sent: bytes, answer: bytes
) -> None:
    """Without an agreement, the first bytes decide."""
    context = made.client_context()
    context.set_alpn_protocols(offered)

    async def test() -> None:
        async with serving(Script(), tls=pair) as server, connected(server.port, context) as client:
            client.send(sent)

            assert await client.read(len(answer) or 1) == answer

    run(test)


@pytest.mark.parametrize("sent", [b"bad\r\n\r\n", PREFACE + b"bad" * 9], ids=["HTTP/1.1", "HTTP/2"])
def test_bad_request_before_a_broken_record_harms_nobody_else(
    made: Certificates, pair: WatchedCertificate[ServerPair], sent: bytes
) -> None:
    """The refusal cannot be encrypted any more."""

    async def test() -> None:
        faults: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        async with (
            serving(Script(), tls=pair) as server,
            connected(server.port, made.client_context(), shakes=False) as client,
        ):
            await client.shake(flushes_last=False)
            client.tls.write(sent)
            client.flush(b"\x17\x03\x03\x00\x20" + bytes(32))
            with suppress(ConnectionResetError):
                while await client.reader.read(1000):
                    pass
            await until(lambda: not len(server.clients))
            async with connected(server.port, made.client_context()) as other:
                other.send(GET)
                answer = await other.read(13)

            assert answer == b"HTTP/1.1 200 "
            assert faults == []

    run(test)


def test_running_stream_keeps_its_certificate_and_the_next_connection_gets_the_new_one(
    made: Certificates, pair: WatchedCertificate[ServerPair]
) -> None:
    async def test() -> None:
        go = asyncio.Event()
        async with serving(
            Script("before", go, "after"), tls=pair, trusts=made.client_context(), connections_max=2
        ) as server:
            async with server.session.post(COMPLETIONS, json=STREAMED) as answer:
                first = await answer.content.readuntil(b"\n\n")
                old = serial_of(pair.context, made.client_context())
                made.pair(days=30)
                pair.look()
                pair.look()
                async with connected(server.port, made.client_context()) as client:
                    shown = client.tls.getpeercert()
                go.set()
                rest = await answer.content.read()

            assert b"before" in first
            assert b"after" in rest
            assert rest.endswith(b"data: [DONE]\n\n")
            assert shown is not None
            assert shown["serialNumber"] == serial_of(pair.context, made.client_context()) != old

    run(test)


def test_client_that_does_not_read_is_cut_as_over_tcp(made: Certificates, pair: WatchedCertificate[ServerPair]) -> None:
    config = HttpConfig(client=ClientBounds(buffer_bytes_max=65_536, stall_s_max=0.2))

    async def test() -> None:
        script = Script(*["x" * 65_536] * 400)
        async with (
            serving(script, tls=pair, config=config) as server,
            connected(server.port, made.client_context()) as client,
        ):
            body = b'{"model": "org/tiny", "prompt": "x", "stream": true}'
            with capture_logs():
                client.send(
                    f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
                )
                client.writer.transport.pause_reading()  # type: ignore[attr-defined]
                await until(lambda: not len(server.clients) and bool(server.outcomes.seen))

            assert server.outcomes.seen == [Reason.SLOW_CLIENT]

    run(test)


@pytest.mark.parametrize("request_bytes", [GET, PREFACE])
def test_client_without_tls_is_told_so(
    made: Certificates, pair: WatchedCertificate[ServerPair], request_bytes: bytes
) -> None:
    async def test() -> None:
        async with serving(Script(), tls=pair) as server:
            reader, writer = await server.connect()
            with capture_logs() as lines:
                writer.write(request_bytes)
                answer = await reader.read()

            assert answer.startswith(b"HTTP/1.1 400 ")
            assert b"This port speaks TLS: use https://" in answer
            assert [line["why"] for line in lines] == ["the peer does not speak TLS"]
            assert pair.failures == 1

    run(test)


def test_client_that_trusts_another_ca_is_logged(tmp_path: Path, pair: WatchedCertificate[ServerPair]) -> None:
    async def test() -> None:
        other = Certificates(tmp_path / "other").client_context()
        async with serving(Script(), tls=pair) as server, connected(server.port, other, shakes=False) as client:
            with capture_logs() as lines:
                with pytest.raises(ssl.SSLCertVerificationError):
                    await client.shake()
                client.flush()
                await until(lambda: bool(lines))

            why = "the peer does not accept the certificate of this process: it is not from the peer's CA"
            assert [line["why"] for line in lines] == [why]

    run(test)


def test_client_for_whom_there_is_no_room_gets_an_alert(
    made: Certificates, pair: WatchedCertificate[ServerPair]
) -> None:
    async def test() -> None:
        async with serving(Script(), tls=pair) as server:
            sock = socket.create_connection(("127.0.0.1", server.port))
            sock.setblocking(False)
            with sock, capture_logs() as lines, descriptors_left(8):
                reply = await asyncio.get_running_loop().sock_recv(sock, 100)

            assert reply == NO_ROOM
            assert [line["event"] for line in lines] == ["no room for more clients"]

    run(test)


def test_handshakes_under_way_end_with_the_server(made: Certificates, pair: WatchedCertificate[ServerPair]) -> None:
    async def test() -> None:
        async with serving(Script(), tls=pair) as server:
            reader, writer = await server.connect()
            writer.write(b"\x16\x03\x01")
            await asyncio.sleep(0)
        assert await reader.read() == b""

    run(test)
