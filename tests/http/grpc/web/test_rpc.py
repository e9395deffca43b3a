"""Rpcs over gRPC-Web have the semantics and the bounds of gRPC, over HTTP/1.1 and HTTP/2, and end in the body."""

import asyncio
import base64
import gzip
import random
from collections.abc import Mapping
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from services.core.errors import Failure, Reason
from services.core.flow.client_flow import ClientBounds
from services.core.tenant import Tenant
from services.http.h2.wire.frames import DATA, ErrorCode, frame, rst_stream
from services.http.host_rule import HostRule
from services.http.server.config import STRANGER_BODY_BYTES_MAX, HttpConfig
from services.rpc.status import MESSAGE_BYTES_MAX
from tests.http.grpc.interop_service import ECHOED
from tests.http.grpc.support import (
    EMPTY_CALL,
    HEADERS,
    INPUT_CALL,
    OUTPUT_CALL,
    UNARY_CALL,
    message,
    message_in,
    raw_client,
    serving_rpcs,
)
from tests.http.grpc.web.support import BINARY, TEXT, VERSIONS, WebAnswer, answer_of, ask, encoded
from tests.http.support import deaf_client, run

OK = 0
SIZES = [31_415, 9, 2_653]
PAGE = {"origin": "https://chat.example"}

pytestmark = pytest.mark.parametrize("version", VERSIONS)


def call(test: Any, **options: Any) -> None:
    """Run a test against the service."""

    async def serve() -> None:
        async with serving_rpcs(**options) as serving:
            await test(serving)

    run(serve)


# Answers


@pytest.mark.parametrize("headers", [BINARY, TEXT], ids=["binary", "text"])
def test_stream_is_its_messages_and_a_status(version: str, headers: dict[str, str]) -> None:
    async def test(serving: Any) -> None:
        asked = encoded(serving, "StreamingOutputCallRequest", response_parameters=[{"size": size} for size in SIZES])
        body = base64.b64encode(asked) if headers is TEXT else asked
        answer = await ask(serving, version, OUTPUT_CALL, body, headers)

        kind = serving.service.types["StreamingOutputCallResponse"]
        assert [len(kind.FromString(content).payload.body) for _, content in answer.messages] == SIZES
        assert (answer.status, answer.code) == (200, OK)
        text = "-text" if headers is TEXT else ""
        assert answer.headers["content-type"] == f"application/grpc-web{text}+proto"

    call(test)


def test_client_that_accepts_text_gets_it_for_a_binary_request(version: str) -> None:
    async def test(serving: Any) -> None:
        headers = BINARY | {"accept": "application/grpc-web-text"}
        answer = await ask(serving, version, EMPTY_CALL, message(b""), headers)

        assert (answer.code, answer.messages) == (OK, [(0, b"")])
        assert answer.headers["content-type"] == "application/grpc-web-text+proto"

    call(test)


def test_stream_of_requests_is_taken_whole(version: str) -> None:
    async def test(serving: Any) -> None:
        sent = [encoded(serving, "StreamingInputCallRequest", payload={"body": bytes(size)}) for size in SIZES]
        answer = await ask(serving, version, INPUT_CALL, b"".join(sent), BINARY)

        [(_, content)] = answer.messages
        kind = serving.service.types["StreamingInputCallResponse"]
        assert kind.FromString(content).aggregated_payload_size == sum(SIZES)

    call(test)


def test_metadata_go_both_ways(version: str) -> None:
    async def test(serving: Any) -> None:
        initial, trailing = ECHOED
        headers = BINARY | {initial: "value", trailing: base64.b64encode(b"\xab\x00").decode()}
        answer = await ask(serving, version, UNARY_CALL, encoded(serving, "SimpleRequest"), headers)

        assert answer.headers[initial] == "value"
        assert answer.trailers is not None
        assert base64.b64decode(answer.trailers[trailing] + "==") == b"\xab\x00"

    call(test)


@pytest.mark.parametrize("text", ["test", "\t\nwith whitespace\r\nand ☺ and 😈\t\n"])
def test_status_has_its_message(version: str, text: str) -> None:
    async def test(serving: Any) -> None:
        asked = encoded(serving, "SimpleRequest", response_status={"code": 2, "message": text})
        answer = await ask(serving, version, UNARY_CALL, asked, BINARY)

        assert (answer.status, answer.code, answer.messages) == (200, 2, [])
        assert answer.trailers is not None
        assert message_in(answer.trailers) == text

    call(test)


def test_unknown_method_and_other_types_have_a_status_of_http(version: str) -> None:
    """The statuses stand for UNIMPLEMENTED and UNKNOWN. Source: doc/http-grpc-status-mapping.md of grpc/grpc."""

    async def test(serving: Any) -> None:
        unknown = await ask(serving, version, "/grpc.testing.TestService/Unknown", message(b""), BINARY)
        other = await ask(serving, version, EMPTY_CALL, b"{}", {"content-type": "application/json"})
        got = await ask(serving, version, EMPTY_CALL, b"", BINARY, method="GET")

        assert [one.status for one in (unknown, other, got)] == [404, 415, 405]
        assert b"gRPC-Web" in other.body

    call(test)


def test_bug_of_a_handler_is_logged_and_told_as_internal(version: str) -> None:
    async def test(serving: Any) -> None:
        serving.service.types["SimpleResponse"] = None
        answer = await ask(serving, version, UNARY_CALL, message(b""), BINARY)

        assert answer.code == grpc.StatusCode.INTERNAL.value[0]

    with capture_logs() as logs:
        call(test)
    assert [entry["event"] for entry in logs] == ["bug"]


def test_deadline_ends_the_rpc_although_its_handler_hangs(version: str) -> None:
    async def test(serving: Any) -> None:
        parameters = [{"size": 1, "interval_us": 0}, {"size": 1, "interval_us": 10**9}]
        asked = encoded(serving, "StreamingOutputCallRequest", response_parameters=parameters)
        answer = await ask(serving, version, OUTPUT_CALL, asked, BINARY | {"grpc-timeout": "10m"})

        assert answer.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
        assert len(answer.messages) == 1

    call(test)


def test_guard_refuses_with_a_status(version: str) -> None:
    def guard(metadata: Any) -> None:
        if "authorization" not in dict(metadata):
            raise Failure(Reason.UNAUTHENTICATED, "who are you?")

    async def test(serving: Any) -> None:
        refused = await ask(serving, version, EMPTY_CALL, message(b""), BINARY)
        allowed = await ask(serving, version, EMPTY_CALL, message(b""), BINARY | {"authorization": "x"})

        assert (refused.status, refused.code) == (200, grpc.StatusCode.UNAUTHENTICATED.value[0])
        assert allowed.code == OK

    call(test, guard=guard)


def test_guard_refuses_before_the_request_has_come(version: str) -> None:
    def guard(metadata: Any) -> None:
        raise Failure(Reason.UNAUTHENTICATED, "who are you?")

    async def test(serving: Any) -> None:
        headers = BINARY | {"content-length": "1000"}
        if version == "HTTP/1.1":
            reader, writer = await serving.server.connect()
            lines = [f"POST {EMPTY_CALL} HTTP/1.1", "Host: x", *(f"{name}: {headers[name]}" for name in headers)]
            writer.write("\r\n".join([*lines, "", ""]).encode())
            answer = await reader.read()
        else:
            async with raw_client(serving) as client:
                answer = (await client.answer(client.open(EMPTY_CALL, headers, ends=False))).body

        assert f"grpc-status: {grpc.StatusCode.UNAUTHENTICATED.value[0]}\r\n".encode() in answer

    call(test, guard=guard)


# Requests that are wrong


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", grpc.StatusCode.INTERNAL),
        (message(b"") * 2, grpc.StatusCode.INTERNAL),
        (message(b"")[:-1], grpc.StatusCode.INTERNAL),
        (message(b"ab")[:-1], grpc.StatusCode.INTERNAL),
        (message(b"", flag=0x80), grpc.StatusCode.INTERNAL),
        (message(b"", flag=1), grpc.StatusCode.INTERNAL),
        (message(b"\xff"), grpc.StatusCode.INVALID_ARGUMENT),
        (b"\0" + (MESSAGE_BYTES_MAX + 1).to_bytes(4, "big"), grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
)
def test_request_that_is_no_message_is_refused(version: str, content: bytes, code: grpc.StatusCode) -> None:
    async def test(serving: Any) -> None:
        answer = await ask(serving, version, EMPTY_CALL, content, BINARY)

        assert (answer.status, answer.code) == (200, code.value[0])

    call(test)


def test_text_that_is_not_base64_is_refused(version: str) -> None:
    async def test(serving: Any) -> None:
        answer = await ask(serving, version, EMPTY_CALL, b"AAAAAAA", TEXT)

        assert answer.code == grpc.StatusCode.INTERNAL.value[0]
        assert answer.headers["content-type"] == "application/grpc-web-text+proto"

    call(test)


def test_large_text_is_decoded_beside_the_event_loop(version: str) -> None:
    async def test(serving: Any) -> None:
        asked = encoded(serving, "SimpleRequest", payload={"body": random.Random(1).randbytes(300_000)})
        answer = await ask(serving, version, UNARY_CALL, base64.b64encode(asked), TEXT)

        assert answer.code == OK

    call(test)


def test_request_that_is_too_large_is_refused(version: str) -> None:
    async def test(serving: Any) -> None:
        answer = await ask(serving, version, EMPTY_CALL, message(bytes(2_000)), BINARY)

        assert answer.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]

    call(test, config=HttpConfig(body_bytes_max=1_000))


@pytest.mark.parametrize("encoding", [{"content-encoding": "gzip"}, {"grpc-encoding": "gzip"}], ids=["body", "message"])
def test_request_that_expands_beyond_its_bound_is_refused(version: str, encoding: dict[str, str]) -> None:
    async def test(serving: Any) -> None:
        bomb = gzip.compress(bytes(4 * MESSAGE_BYTES_MAX), compresslevel=1)
        body = bomb if "content-encoding" in encoding else message(bomb, flag=1)
        answer = await ask(serving, version, EMPTY_CALL, body, BINARY | encoding)

        assert answer.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]

    call(test, config=HttpConfig(body_bytes_max=MESSAGE_BYTES_MAX))


def test_compressed_requests_are_read_and_a_client_that_compresses_gets_its_answer_compressed(version: str) -> None:
    async def test(serving: Any) -> None:
        asked = serving.service.types["SimpleRequest"](response_size=50_000).SerializeToString()
        whole = gzip.compress(message(asked))
        plain = await ask(serving, version, UNARY_CALL, whole, BINARY | {"content-encoding": "gzip"})
        content = message(gzip.compress(asked), flag=1)
        packed = await ask(serving, version, UNARY_CALL, content, BINARY | {"grpc-encoding": "gzip"})

        assert [flag for flag, _ in plain.messages] == [0]
        assert "grpc-encoding" not in plain.headers
        [(flag, answered)] = packed.messages
        assert (flag, packed.headers["grpc-encoding"]) == (1, "gzip")
        assert gzip.decompress(answered) == plain.messages[0][1]

    call(test)


# Clients that leave, and that do not read


def test_client_that_leaves_cancels_the_handler(version: str) -> None:
    async def test(serving: Any) -> None:
        cancelled = asyncio.Event()
        begun = asyncio.Event()

        async def hang(request: Any, context: Any) -> None:
            context.send_head(())
            begun.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise

        serving.routes.methods[OUTPUT_CALL].behaviour = hang
        if version == "HTTP/1.1":
            reader, writer = await serving.server.connect()
            writer.write(http1(OUTPUT_CALL, message(b"")))
            await reader.readuntil(b"\r\n\r\n")  # The head does not wait for a message.
            writer.close()
        else:
            async with raw_client(serving) as client:
                stream_id = client.post(OUTPUT_CALL, message(b""), BINARY)
                await client.until(lambda: client.answers[stream_id].headers)
                client.send(rst_stream(stream_id, ErrorCode.CANCEL))
                await cancelled.wait()
        await cancelled.wait()
        assert begun.is_set()

    call(test)


def http1(path: str, body: bytes, *, head: bytes = b"") -> bytes:
    """A request over HTTP/1.1. `head`: further lines."""
    return (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/grpc-web\r\nContent-Length: {len(body)}\r\n"
    ).encode() + b"%b\r\n%b" % (head, body)


def test_client_that_does_not_read_is_cut(version: str) -> None:
    async def test(serving: Any) -> None:
        asked = encoded(serving, "SimpleRequest", response_size=15_000_000)
        if version == "HTTP/1.1":
            with deaf_client(serving.server, http1(UNARY_CALL, asked)) as client:
                await until_cut(serving)
                assert client.fileno() >= 0
        else:
            async with raw_client(serving, window=100) as other:
                answer = await other.answer(other.post(UNARY_CALL, asked, BINARY))
                assert answer.reset is ErrorCode.CANCEL

    with capture_logs() as logs:
        call(test, bounds=ClientBounds(drain_s_max=0.1))
    assert [entry["reason"] for entry in logs if entry["event"] == "client cut"] == ["SLOW_CLIENT"]


def test_answer_of_a_client_that_does_not_read_is_cut_when_its_handler_gives_up(version: str) -> None:
    async def test(serving: Any) -> None:
        async def give_up(request: Any, context: Any) -> None:
            context.send(serving.service.types["StreamingOutputCallResponse"]())
            raise Failure(Reason.SLOW_CLIENT, "the client has read nothing")

        serving.routes.methods[OUTPUT_CALL].behaviour = give_up
        if version == "HTTP/1.1":
            reader, writer = await serving.server.connect()
            writer.write(http1(OUTPUT_CALL, message(b"")))
            with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
                await reader.readuntil(b"\r\n0\r\n\r\n")
        else:
            async with raw_client(serving) as client:
                answer = await client.answer(client.post(OUTPUT_CALL, message(b""), BINARY))
                assert (answer.reset, answer.has_ended) == (ErrorCode.CANCEL, False)

    call(test)


async def until_cut(serving: Any) -> None:
    while not len(serving.context.clients):
        await asyncio.sleep(0.001)
    while len(serving.context.clients):
        await asyncio.sleep(0.001)


def test_handler_waits_while_its_client_is_slow(version: str) -> None:
    async def test(serving: Any) -> None:
        sent, is_done = 0, asyncio.Event()
        many = 400

        async def flood(request: Any, context: Any) -> None:
            nonlocal sent
            for _ in range(many):
                await context.write(
                    serving.service.types["StreamingOutputCallResponse"](payload={"body": bytes(1 << 16)})
                )
                sent += 1
            is_done.set()

        serving.routes.methods[OUTPUT_CALL].behaviour = flood
        if version == "HTTP/1.1":
            with deaf_client(serving.server, http1(OUTPUT_CALL, message(b""))) as client:
                await until_still(lambda: sent)
                assert 0 < sent < many
                loop, body = asyncio.get_running_loop(), b""
                while not body.endswith(b"\r\n0\r\n\r\n"):
                    body += await loop.sock_recv(client, 1 << 20)
        else:
            async with raw_client(serving, window=1 << 17) as other:
                other.post(OUTPUT_CALL, message(b""), BINARY)
                await other.until(lambda: len(other.answers[1].body) == 1 << 17)
                await until_still(lambda: sent)
                assert 0 < sent < many
                return
        assert is_done.is_set()

    call(test)


async def until_still(count: Any) -> None:
    """Wait until a number has not changed for some iterations of the event loop."""
    before = -1
    while before != count() or not before:
        before = count()
        for _ in range(20):
            await asyncio.sleep(0.001)


# Cuts of the bytes, drain and CORS


def test_request_is_read_however_its_bytes_are_cut(version: str) -> None:
    async def test(serving: Any) -> None:
        asked = base64.b64encode(encoded(serving, "SimpleRequest", response_size=5))
        if version == "HTTP/1.1":
            reader, writer = await serving.server.connect()
            request = http1(UNARY_CALL, asked).replace(b"grpc-web\r\n", b"grpc-web-text\r\nConnection: close\r\n")
            for at in range(len(request)):
                writer.write(request[at : at + 1])
                await writer.drain()
                await asyncio.sleep(0)
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            assert b"Transfer-Encoding: chunked" in head
            answer = answer_of(200, {"content-type": "application/grpc-web-text"}, unchunked(body))
            assert [content[-5:] for _, content in answer.messages] == [bytes(5)]
            assert answer.code == OK
        else:
            async with raw_client(serving) as client:
                stream_id = client.open(UNARY_CALL, TEXT, ends=False)
                client.send(
                    *(
                        bytes((0, 0, 1, 0, 0)) + stream_id.to_bytes(4, "big") + asked[at : at + 1]
                        for at in range(len(asked))
                    )
                )
                client.send(bytes((0, 0, 0, 0, 1)) + stream_id.to_bytes(4, "big"))
                received = await client.answer(stream_id)
                assert answer_of(200, received.headers, received.body).code == OK

    call(test)


def unchunked(body: bytes) -> bytes:
    """The content of a body in chunks."""
    content = b""
    while body != b"0\r\n\r\n":
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        content, body = content + rest[:length], rest[length + 2 :]
    return content


def test_server_that_drains_tells_the_client_with_the_answer(version: str) -> None:
    async def test(serving: Any) -> None:
        if version == "HTTP/1.1":
            reader, writer = await serving.server.connect()
            writer.write(http1(EMPTY_CALL, message(b"")))
            head, _, _ = (await reader.read()).partition(b"\r\n\r\n")  # To the end of the connection.
            assert b"Connection: close" in head
        else:
            async with raw_client(serving) as client:
                await client.answer(client.post(EMPTY_CALL, message(b""), BINARY))
                await client.until(lambda: client.goaways)
                assert client.goaways[0][1] is ErrorCode.NO_ERROR

    call(test, is_draining=lambda: True)


def test_pages_of_an_allowed_origin_may_call(version: str) -> None:
    async def test(serving: Any) -> None:
        wish = PAGE | {
            "access-control-request-method": "POST",
            "access-control-request-headers": "content-type,x-grpc-web,x-user-agent,grpc-timeout,x-on-disconnect",
        }
        preflight = await ask(serving, version, EMPTY_CALL, b"", wish, method="OPTIONS")
        answer = await ask(serving, version, EMPTY_CALL, message(b""), BINARY | PAGE)

        assert preflight.status == 200
        assert preflight.headers["access-control-allow-methods"] == "POST"
        assert preflight.headers["access-control-allow-headers"] == wish["access-control-request-headers"]
        assert answer.code == OK
        assert answer.headers["access-control-allow-origin"] == PAGE["origin"]
        exposed = answer.headers["access-control-expose-headers"]
        assert {"grpc-status", "grpc-message", "grpc-status-details-bin"} <= set(exposed.split(", "))

    call(test, config=HttpConfig(cors_origins=(PAGE["origin"],)))


def test_rpcs_with_a_guard_are_closed_to_pages(version: str) -> None:
    async def test(serving: Any) -> None:
        answer = await ask(serving, version, EMPTY_CALL, message(b""), BINARY | PAGE)

        assert answer.code == OK
        assert "access-control-allow-origin" not in answer.headers

    call(test, config=HttpConfig(cors_origins=("*",)), guard=lambda _: None)


# Strangers


def stranger(headers: Mapping[str, str]) -> Tenant:
    """A guard that lets nobody in."""
    raise Failure(Reason.UNAUTHENTICATED, "who are you?")


@pytest.mark.parametrize("bad", [{"x-bin": "!!!"}, {"grpc-timeout": "soon"}], ids=["metadata", "timeout"])
def test_client_without_a_key_is_refused_before_its_body_whatever_else_is_wrong(
    version: str, bad: dict[str, str]
) -> None:
    """A bug: binary metadata that could not be decoded had the body waited for, without a look at the key."""

    async def test(serving: Any) -> None:
        answer = await unfinished(serving, version, UNARY_CALL, BINARY | bad, 0)
        assert answer.code == grpc.StatusCode.UNAUTHENTICATED.value[0]

    call(test, guard=stranger)


def test_service_that_is_open_to_strangers_takes_small_requests_alone(version: str) -> None:
    async def test(serving: Any) -> None:
        small = await ask(serving, version, EMPTY_CALL, message(b""), BINARY)
        large = await unfinished(serving, version, EMPTY_CALL, BINARY, STRANGER_BODY_BYTES_MAX + 1)
        over_grpc = await refused_over_grpc(serving)
        assert small.code == OK
        assert large.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        assert over_grpc == str(grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])

    call(test, tenant_of=stranger)


@pytest.mark.parametrize("headers", [BINARY, TEXT], ids=["binary", "text"])
def test_page_of_another_origin_cannot_call_a_server_without_keys(version: str, headers: dict[str, str]) -> None:
    """A bug: the refusal of a request that came at once was forgotten, as the rpc tells of refusals itself."""

    async def test(serving: Any) -> None:
        answer = await ask(serving, version, EMPTY_CALL, encoded_empty(headers), headers | PAGE)
        assert answer.code == grpc.StatusCode.UNAUTHENTICATED.value[0]

    call(test, host_rule=HostRule(is_open=True))


def encoded_empty(headers: dict[str, str]) -> bytes:
    return base64.b64encode(message(b"")) if headers is TEXT else message(b"")


async def unfinished(serving: Any, version: str, path: str, headers: dict[str, str], size: int) -> WebAnswer:
    """The answer to a request of which only `size` bytes of the body come."""
    if version == "HTTP/2":
        async with raw_client(serving) as client:
            stream_id = client.open(path, headers, ends=False)
            client.send(frame(DATA, 0, stream_id, bytes(size)))
            answer = await client.answer(stream_id)
            return answer_of(answer.status, answer.headers, answer.body)
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Length: 200000", *(f"{n}: {v}" for n, v in headers.items())]
    reader, writer = await serving.server.connect()
    writer.write("\r\n".join([*lines, "", ""]).encode() + bytes(size))
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    fields = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:-2])}
    body = b""
    while chunk_size := int((await reader.readline()).strip(), 16):
        body += (await reader.readexactly(chunk_size + 2))[:-2]
    return answer_of(int(head[0].split()[1]), fields, body)


async def refused_over_grpc(serving: Any) -> str:
    async with raw_client(serving) as client:
        stream_id = client.open(EMPTY_CALL, HEADERS, ends=False)
        client.send(frame(DATA, 0, stream_id, message(bytes(STRANGER_BODY_BYTES_MAX))))
        return str((await client.answer(stream_id)).headers["grpc-status"])
