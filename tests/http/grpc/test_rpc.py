"""Rpcs have the semantics of gRPC: messages in order, one status, deadlines, metadata, and bounds on what comes."""

import asyncio
import base64
import gzip
import weakref
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from services.core.bounded_executor import BoundedExecutor
from services.core.errors import Failure, Reason
from services.core.flow.client_flow import ClientBounds
from services.core.tenant import EVERYBODY, Tenant
from services.http.grpc.messages import COMPRESSED_BYTES_MIN, INLINE_BYTES_MAX, MessageReader
from services.http.h2.wire.frames import DATA, END_STREAM, PREFACE, ErrorCode, frame, rst_stream, window_update
from services.http.server.config import HttpConfig
from services.rpc.status import MESSAGE_BYTES_MAX
from tests.http.grpc.interop_service import ECHOED, SERVICE
from tests.http.grpc.support import (
    EMPTY_CALL,
    HEADERS,
    INPUT_CALL,
    OUTPUT_CALL,
    UNARY_CALL,
    error_in,
    message,
    message_in,
    raw_client,
    serving_rpcs,
    stub_of,
)
from tests.http.h2.support import settings
from tests.http.support import run
from tests.support.clock import WAIT_S

WHOLE = gzip.compress(b"", mtime=0)


def call(test: Any) -> None:
    """Run a test with a stub of grpcio against the service."""

    async def serve() -> None:
        async with serving_rpcs() as serving, stub_of(serving) as stub:
            await test(stub, serving)

    run(serve)


def test_all_kinds_of_methods_with_grpcio() -> None:
    async def test(stub: Any, serving: Any) -> None:
        types = serving.service.types
        payload = types["Payload"](body=bytes(271_828))
        unary = await stub.unary(types["SimpleRequest"](response_size=314_159, payload=payload), timeout=WAIT_S)
        assert len(unary.payload.body) == 314_159

        sizes = [31_415, 9, 2_653, 58_979]
        asked = types["StreamingOutputCallRequest"](response_parameters=[{"size": size} for size in sizes])
        assert [len(one.payload.body) async for one in stub.output(asked, timeout=WAIT_S)] == sizes

        sent = [
            types["StreamingInputCallRequest"](payload={"body": bytes(size)}) for size in (27_182, 8, 1_828, 45_904)
        ]
        total = await stub.input(iter(sent), timeout=WAIT_S)
        assert total.aggregated_payload_size == 74_922

        duplex = stub.duplex(timeout=WAIT_S)
        for size in sizes:
            await duplex.write(types["StreamingOutputCallRequest"](response_parameters=[{"size": size}]))
            assert len((await duplex.read()).payload.body) == size
        await duplex.done_writing()
        assert await duplex.read() is grpc.aio.EOF
        assert await duplex.code() is grpc.StatusCode.OK

    call(test)


def test_metadata_go_both_ways() -> None:
    async def test(stub: Any, serving: Any) -> None:
        initial, trailing = ECHOED
        metadata = ((initial, "value"), (trailing, b"\xab\x00\xff"))
        rpc = stub.unary(serving.service.types["SimpleRequest"](), metadata=metadata, timeout=WAIT_S)
        await rpc

        assert dict(await rpc.initial_metadata())[initial] == "value"
        assert dict(await rpc.trailing_metadata())[trailing] == b"\xab\x00\xff"

    call(test)


@pytest.mark.parametrize("value", ["!", "é"])
def test_binary_metadata_that_are_not_in_base64_are_refused_and_the_connection_goes_on(value: str) -> None:
    """Characters beyond ASCII are another error of Python's base64, which once ended the connection."""

    async def test() -> None:
        async with serving_rpcs() as serving, raw_client(serving) as client:
            refused = await client.answer(client.post(EMPTY_CALL, message(b""), HEADERS | {"x-bin": value}))
            other = await client.answer(client.post(EMPTY_CALL, message(b""), HEADERS))

        assert refused.headers["grpc-status"] == str(grpc.StatusCode.INVALID_ARGUMENT.value[0])
        assert other.trailers["grpc-status"] == "0"

    run(test)


@pytest.mark.parametrize("text", ["test", "\t\nwith whitespace\r\nand ☺ and 😈\t\n", "100 %", ""])
def test_status_has_its_message(text: str) -> None:
    async def test(stub: Any, serving: Any) -> None:
        status = {"code": 2, "message": text}
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.unary(serving.service.types["SimpleRequest"](response_status=status), timeout=WAIT_S)

        assert raised.value.code() is grpc.StatusCode.UNKNOWN
        assert raised.value.details() == text

    call(test)


def test_status_before_a_message_is_one_frame() -> None:
    """Trailers-only."""

    async def test() -> None:
        async with serving_rpcs() as serving, raw_client(serving) as client:
            stream_id = client.post("/grpc.testing.TestService/Unknown", message(b""), HEADERS)

            answer = await client.answer(stream_id)

            assert len([one for one in client.seen if one.stream_id == stream_id]) == 1
            assert answer.headers["grpc-status"] == str(grpc.StatusCode.UNIMPLEMENTED.value[0])
            assert "no method" in message_in(answer.headers)
            other = await client.answer(client.post("/other.Service/Method", message(b""), HEADERS))
            assert "no service" in message_in(other.headers)

    run(test)


def test_request_is_held_by_its_handler_alone() -> None:
    """An answer may take minutes, and a prompt may have megabytes."""

    class Message:
        """The messages of protobuf take no weak references."""

    async def test() -> None:
        async with serving_rpcs() as serving, raw_client(serving) as client:
            held: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

            async def behave(request: Message, _: Any) -> bytes:
                seen = weakref.ref(request)
                del request
                held.set_result(seen() is not None)
                return b""

            handler = grpc.unary_unary_rpc_method_handler(behave, lambda _: Message(), bytes)
            serving.routes.add_registered_method_handlers("test.Holding", {"Call": handler})
            client.post("/test.Holding/Call", message(b""), HEADERS)
            async with asyncio.timeout(WAIT_S):
                assert not await held

    run(test)


def test_deadline_ends_the_rpc_although_its_handler_hangs() -> None:
    async def test() -> None:
        async with serving_rpcs() as serving, raw_client(serving) as client:
            path = f"/{SERVICE}/StreamingInputCall"
            answer = await client.answer(client.open(path, HEADERS | {"grpc-timeout": "10m"}, ends=False))

            assert answer.headers["grpc-status"] == str(grpc.StatusCode.DEADLINE_EXCEEDED.value[0])
            await serving.service.cancelled.wait()

    run(test)


@pytest.mark.parametrize("timeout", ["", "5", "5x", "123456789S", "-1S"])
def test_malformed_timeout_is_refused(timeout: str) -> None:
    async def test() -> None:
        async with serving_rpcs() as serving, raw_client(serving) as client:
            answer = await client.answer(client.post(EMPTY_CALL, message(b""), HEADERS | {"grpc-timeout": timeout}))

        assert answer.headers["grpc-status"] == str(grpc.StatusCode.INVALID_ARGUMENT.value[0])

    run(test)


def test_client_that_cancels_cancels_the_handler() -> None:
    async def test() -> None:
        async with serving_rpcs() as serving, raw_client(serving) as client:
            stream_id = client.open(f"/{SERVICE}/StreamingInputCall", HEADERS, ends=False)
            await client.until(lambda: client.seen)
            client.send(rst_stream(stream_id, ErrorCode.CANCEL))

            await serving.service.cancelled.wait()

    run(test)


def test_handler_sends_nothing_on_a_stream_that_was_reset() -> None:
    async def test() -> None:
        async with serving_rpcs() as serving, raw_client(serving) as client:
            has_sent = asyncio.Event()

            async def send_late(requests: Any, context: Any) -> None:
                try:
                    await context.read()
                finally:
                    context.send_head(())
                    has_sent.set()

            serving.routes.methods[INPUT_CALL].behaviour = send_late
            stream_id = client.open(INPUT_CALL, HEADERS, ends=False)
            await client.until(lambda: client.seen)
            client.send(rst_stream(stream_id, ErrorCode.CANCEL))
            await has_sent.wait()

            await client.answer(client.post(EMPTY_CALL, message(b""), HEADERS))
            assert [one for one in client.seen if one.stream_id == stream_id] == []

    run(test)


def test_bug_of_a_handler_is_logged_and_told_as_internal() -> None:
    async def test() -> None:
        async with serving_rpcs() as serving, raw_client(serving) as client:
            serving.service.types["SimpleResponse"] = None
            answer = await client.answer(client.post(UNARY_CALL, message(b""), HEADERS))

        assert answer.headers["grpc-status"] == str(grpc.StatusCode.INTERNAL.value[0])
        assert "NoneType" not in message_in(answer.headers)

    with capture_logs() as logs:
        run(test)
    assert [entry["event"] for entry in logs] == ["bug"]


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", grpc.StatusCode.INTERNAL),
        (message(b"") * 2, grpc.StatusCode.INTERNAL),
        (message(b"")[:-1], grpc.StatusCode.INTERNAL),
        (message(b"", flag=2), grpc.StatusCode.INTERNAL),
        (message(b"", flag=1), grpc.StatusCode.INTERNAL),
        (message(b"\xff"), grpc.StatusCode.INVALID_ARGUMENT),
        (b"\0" + (MESSAGE_BYTES_MAX + 1).to_bytes(4, "big"), grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
)
def test_request_that_is_no_message_is_refused(content: bytes, code: grpc.StatusCode) -> None:
    async def test() -> None:
        async with serving_rpcs() as serving, raw_client(serving) as client:
            answer = await client.answer(client.post(EMPTY_CALL, content, HEADERS))

        assert answer.headers["grpc-status"] == str(code.value[0])

    run(test)


def test_request_that_does_not_arrive_in_time_is_ended() -> None:
    async def test() -> None:
        async with serving_rpcs(config=HttpConfig(body_read_s_max=0.05)) as serving, raw_client(serving) as client:
            answer = await client.answer(client.open(EMPTY_CALL, HEADERS, ends=False))

        assert answer.headers["grpc-status"] == str(grpc.StatusCode.DEADLINE_EXCEEDED.value[0])

    run(test)


def test_messages_are_decoded_however_they_are_cut() -> None:
    async def test() -> None:
        async with serving_rpcs() as serving, raw_client(serving) as client:
            types = serving.service.types
            content = message(types["SimpleRequest"](response_size=5).SerializeToString())
            stream_id = client.open(UNARY_CALL, HEADERS, ends=False)
            client.send(*(frame(DATA, 0, stream_id, content[at : at + 1]) for at in range(len(content))))
            client.send(frame(DATA, END_STREAM, stream_id))

            answer = await client.answer(stream_id)

        assert types["SimpleResponse"].FromString(answer.body[5:]).payload.body == bytes(5)

    run(test)


# Compression


@pytest.mark.parametrize("size", [10, 100 * COMPRESSED_BYTES_MIN])
def test_gzip_both_ways_with_grpcio(size: int) -> None:
    async def test() -> None:
        async with serving_rpcs() as serving, stub_of(serving, compression=grpc.Compression.Gzip) as stub:
            types = serving.service.types
            asked = types["SimpleRequest"](response_size=size, payload={"body": bytes(size)})

            answer = await stub.unary(asked, timeout=WAIT_S)

        assert answer.payload.body == bytes(size)

    run(test)


@pytest.mark.parametrize("size", [50_000, INLINE_BYTES_MAX + 1])
@pytest.mark.parametrize(
    ("accepted", "is_compressed"),
    [({}, True), ({"grpc-accept-encoding": "identity, gzip"}, True), ({"grpc-accept-encoding": "deflate"}, False)],
)
def test_client_that_compresses_gets_large_messages_compressed(
    size: int, accepted: dict[str, str], is_compressed: bool
) -> None:
    async def test() -> None:
        async with serving_rpcs() as serving, raw_client(serving) as client:
            asked = serving.service.types["SimpleRequest"](response_size=size).SerializeToString()
            content = message(gzip.compress(asked), flag=1)
            headers = HEADERS | {"grpc-encoding": "gzip"} | accepted
            answer = await client.answer(client.post(UNARY_CALL, content, headers))

        assert answer.headers.get("grpc-encoding") == ("gzip" if is_compressed else None)
        assert answer.body[0] == is_compressed
        assert (len(answer.body) < 1_000) == is_compressed

    run(test)


def test_large_messages_are_refused_and_sent_as_they_are_while_too_many_are_compressed() -> None:
    async def test() -> None:
        async with serving_rpcs() as serving, raw_client(serving) as client:
            serving.routes.compression._executor = BoundedExecutor(places=0)
            types, headers = serving.service.types, HEADERS | {"grpc-encoding": "gzip"}
            large = types["SimpleRequest"](payload={"body": bytes(2 * INLINE_BYTES_MAX)}).SerializeToString()
            refused = await client.answer(client.post(UNARY_CALL, message(gzip.compress(large), flag=1), headers))
            asked = types["SimpleRequest"](response_size=2 * INLINE_BYTES_MAX).SerializeToString()
            answer = await client.answer(client.post(UNARY_CALL, message(asked), headers))

        assert refused.headers["grpc-status"] == str(grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])
        assert answer.trailers["grpc-status"] == "0"
        assert answer.body[0] == 0

    with capture_logs() as logs:
        run(test)
    assert logs == []


def test_message_that_expands_beyond_its_bound_is_refused() -> None:
    async def test() -> None:
        bomb = gzip.compress(bytes(4 * MESSAGE_BYTES_MAX))
        async with serving_rpcs() as serving, raw_client(serving) as client:
            answer = await client.answer(_send(client, bomb))

        assert answer.headers["grpc-status"] == str(grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])

    run(test)


def _send(client: Any, content: bytes) -> int:
    """Send a compressed message in frames that fit."""
    stream_id: int = client.open(EMPTY_CALL, HEADERS | {"grpc-encoding": "gzip"}, ends=False)
    data = message(content, flag=1)
    pieces = [data[at : at + 16_384] for at in range(0, len(data), 16_384)]
    client.send(*(frame(DATA, 0, stream_id, piece) for piece in pieces), frame(DATA, END_STREAM, stream_id))
    return stream_id


@pytest.mark.parametrize("content", [b"no gzip", WHOLE[:-1], WHOLE * 2], ids=["other", "cut", "two"])
def test_message_that_is_not_gzip_is_refused(content: bytes) -> None:
    async def test() -> None:
        async with serving_rpcs() as serving, raw_client(serving) as client:
            answer = await client.answer(_send(client, content))

        assert answer.headers["grpc-status"] == str(grpc.StatusCode.INTERNAL.value[0])

    run(test)


def test_unknown_encoding_is_refused_with_those_that_are_known() -> None:
    async def test() -> None:
        async with serving_rpcs() as serving, raw_client(serving) as client:
            headers = HEADERS | {"grpc-encoding": "snappy"}
            answer = await client.answer(client.post(EMPTY_CALL, message(b"", flag=1), headers))

        assert answer.headers["grpc-status"] == str(grpc.StatusCode.UNIMPLEMENTED.value[0])
        assert answer.headers["grpc-accept-encoding"] == "identity,gzip"

    run(test)


# Slow clients


def test_answer_that_is_not_read_ends_with_a_status_and_others_go_on() -> None:
    async def test() -> None:
        bounds = ClientBounds(drain_s_max=0.1)
        async with serving_rpcs(bounds=bounds) as serving, raw_client(serving, window=0) as client:
            asked = serving.service.types["SimpleRequest"](response_size=10_000).SerializeToString()
            answer = await client.answer(client.post(UNARY_CALL, message(asked), HEADERS))

            assert answer.trailers["grpc-status"] == str(grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])
            assert Reason.SLOW_CLIENT in base64.b64decode(answer.trailers["grpc-status-details-bin"] + "==").decode(
                errors="replace"
            )
            client.send(settings(window=1_000))
            assert (await client.answer(client.post(EMPTY_CALL, message(b""), HEADERS))).trailers["grpc-status"] == "0"

    with capture_logs() as logs:
        run(test)
    assert [entry["reason"] for entry in logs] == ["SLOW_CLIENT"]


def sized(serving: Any, *sizes: int) -> bytes:
    """A request for messages with this much content."""
    parameters = [{"size": size} for size in sizes]
    asked = serving.service.types["StreamingOutputCallRequest"](response_parameters=parameters)
    return message(asked.SerializeToString())


def messages_in(body: bytes) -> list[bytes]:
    """The messages, all of them whole."""
    reader, found = MessageReader(), []
    reader.feed(body)
    while (one := reader.next()) is not None:
        found.append(one[1])
    assert reader.size == 0, "a message is cut"
    return found


def test_message_is_cut_neither_by_the_window_nor_by_the_end() -> None:
    """Bug: grpc-go took a status behind a part of a message for a broken stream, whatever the status said."""

    async def test() -> None:
        bounds = ClientBounds(drain_s_max=0.3)
        async with serving_rpcs(bounds=bounds) as serving, raw_client(serving, window=1_000) as client:
            stream_id = client.post(OUTPUT_CALL, sized(serving, 400, 400, 400, 10, 400), HEADERS)
            answer = client.answers[stream_id]
            await client.until(lambda: len(messages_in(answer.body)) == 2)
            await client.answer(client.get("/live"))
            assert len(messages_in(answer.body)) == 2, "the window has room for a part of the third"

            client.send(window_update(stream_id, 400))
            await client.until(lambda: len(messages_in(answer.body)) == 4)
            await client.answer(stream_id)

        assert len(messages_in(answer.body)) == 4
        assert error_in(answer.trailers).reason == Reason.SLOW_CLIENT

    run(test)


def test_message_that_waits_for_the_connection_is_not_cut() -> None:
    async def test() -> None:
        async with serving_rpcs() as serving, raw_client(serving, greets=False) as client:
            client.send(PREFACE, settings(window=1 << 20))
            first = client.post(OUTPUT_CALL, sized(serving, *[10_000] * 7), HEADERS)
            await client.until(lambda: len(client.answers[first].body) > 60_000)
            second = client.post(OUTPUT_CALL, sized(serving, 10), HEADERS)
            assert len(messages_in((await client.answer(second)).body)) == 1, "it has room"
            assert len(messages_in(client.answers[first].body)) == 6

            client.send(window_update(0, 6_000))
            answer = await client.answer(first)

        assert len(messages_in(answer.body)) == 7
        assert answer.trailers["grpc-status"] == "0"

    run(test)


def test_rpc_ends_with_a_reset_if_a_large_message_is_cut() -> None:
    """A message that is larger than half of the window has to be sent in parts."""

    async def test() -> None:
        bounds = ClientBounds(drain_s_max=0.1)
        async with serving_rpcs(bounds=bounds) as serving, raw_client(serving, window=1_000) as client:
            answer = await client.answer(client.post(OUTPUT_CALL, sized(serving, 600), HEADERS))
            assert (len(answer.body) > 600, answer.reset) == (True, None), "it is read"
            answer = await client.answer(client.post(OUTPUT_CALL, sized(serving, 1_100), HEADERS))

            assert len(answer.body) == 1_000
            assert (answer.trailers, answer.reset) == ({}, ErrorCode.ENHANCE_YOUR_CALM)
            assert (await client.answer(client.post(EMPTY_CALL, message(b""), HEADERS))).trailers["grpc-status"] == "0"

    run(test)


def test_message_passes_through_a_window_that_becomes_smaller_than_it() -> None:
    async def test() -> None:
        async with serving_rpcs() as serving, raw_client(serving, window=1_000) as client:
            stream_id = client.post(OUTPUT_CALL, sized(serving, 400, 400, 400), HEADERS)
            await client.until(lambda: len(client.answers[stream_id].body) > 800)
            sent = len(client.answers[stream_id].body)
            client.send(settings(window=200), window_update(stream_id, sent - 200 + 100))
            await client.until(lambda: len(client.answers[stream_id].body) == sent + 100)
            client.send(window_update(stream_id, 1_000))
            answer = await client.answer(stream_id)

        assert len(messages_in(answer.body)) == 3

    run(test)


def test_handler_waits_while_its_client_is_slow() -> None:
    async def test() -> None:
        async with serving_rpcs() as serving, raw_client(serving, window=0) as client:
            sizes = [{"size": 50_000}] * 20
            asked = serving.service.types["StreamingOutputCallRequest"](response_parameters=sizes)
            stream_id = client.post(OUTPUT_CALL, message(asked.SerializeToString()), HEADERS)
            await client.until(lambda: client.answers[stream_id].headers)
            [connection] = serving.context.clients._open
            stream = connection._frames.streams.get(stream_id)  # type: ignore[attr-defined]
            while stream.has_room:
                await asyncio.sleep(0.001)
            for _ in range(10):
                await asyncio.sleep(0.001)
            assert stream.unsent_size < 3 * 50_100

            client.send(window_update(stream_id, 1 << 24))
            answer = await client.answer(stream_id)

        assert answer.trailers["grpc-status"] == "0"
        assert len(answer.body) > 20 * 50_000

    run(test)


def test_messages_that_a_handler_does_not_read_close_the_window() -> None:
    async def test() -> None:
        async with serving_rpcs() as serving, raw_client(serving) as client:
            gate = asyncio.Event()

            async def slow(requests: Any, context: Any) -> Any:
                await gate.wait()
                return await serving.service.input(requests, context)

            serving.routes.methods[f"/{SERVICE}/StreamingInputCall"].behaviour = slow
            one = message(
                serving.service.types["StreamingInputCallRequest"](payload={"body": bytes(1000)}).SerializeToString()
            )
            stream_id = client.open(f"/{SERVICE}/StreamingInputCall", HEADERS, ends=False)
            client.send(*(frame(DATA, 0, stream_id, one) for _ in range(200)))
            client.get("/live")
            await client.until(lambda: [frame for frame in client.seen if frame.stream_id == stream_id + 2])
            opened = [one for one in client.seen if one.kind == 8 and one.stream_id == stream_id]
            assert opened == []

            gate.set()
            await client.until(lambda: [one for one in client.seen if one.kind == 8 and one.stream_id == stream_id])
            client.send(frame(DATA, END_STREAM, stream_id))
            assert (await client.answer(stream_id)).trailers["grpc-status"] == "0"

    run(test)


def test_guard_refuses_before_the_request_is_read() -> None:
    async def test() -> None:
        async with serving_rpcs() as serving, raw_client(serving) as client:

            def guard(metadata: Any) -> Tenant:
                if "authorization" not in dict(metadata):
                    raise Failure(Reason.UNAUTHENTICATED, "who are you?")
                return EVERYBODY

            serving.routes.guard(SERVICE, guard)
            paths = (EMPTY_CALL, f"/{SERVICE}/Unknown")
            refused = [await client.answer(client.open(path, HEADERS, ends=False)) for path in paths]
            allowed = await client.answer(client.post(EMPTY_CALL, message(b""), HEADERS | {"authorization": "x"}))

        unauthenticated = str(grpc.StatusCode.UNAUTHENTICATED.value[0])
        assert [one.headers["grpc-status"] for one in refused] == [unauthenticated] * 2
        assert all("grpc-status-details-bin" in one.headers for one in refused)
        assert allowed.trailers["grpc-status"] == "0"

    run(test)


def test_message_above_the_bound_of_bodies_is_refused_with_its_reason() -> None:
    async def scenario() -> None:
        async with serving_rpcs(config=HttpConfig(body_bytes_max=1_000)) as serving, stub_of(serving) as stub:
            types = serving.service.types
            large = types["SimpleRequest"](payload=types["Payload"](body=bytes(2_000)))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.unary(large)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "larger than 1000 bytes" in (caught.value.details() or "")
            assert await stub.empty(types["Empty"]()) == types["Empty"]()

    asyncio.run(scenario())
