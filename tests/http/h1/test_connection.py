"""A connection answers its requests in order, loses none, and waits for none longer than the bounds say."""

import asyncio
import gc
import json
import socket
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from structlog.testing import capture_logs

from services.core.call import Call
from services.core.interface import Delta, Finish, Layer, Sink
from services.core.request import FinishReason, Request
from services.http.h1 import connection
from services.http.h1.connection import Connection
from services.http.h1.parser import RequestParser
from services.http.server import clients
from services.http.server.accept import acceptor as acceptor_module
from services.http.server.config import HttpConfig
from services.http.server.messages import HttpRequest
from services.runtime.loop import run_on_loop
from tests.http.support import HANG, Script, Server, error_of, raw_post, run, serving
from tests.support.clock import WAIT_S

UNARY = {"model": "org/tiny", "prompt": "hi"}
STREAMED = UNARY | {"stream": True}
COMPLETIONS = "/v1/completions"
LAST_CHUNK = b"0\r\n\r\n"
LIVE = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"


class Scripts:
    """A pipeline that plays one script for each request, and repeats the last one."""

    def __init__(self, *scripts: Layer) -> None:
        self.scripts = list(scripts)

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        return await script(request, call, sink)


async def body_of(reader: asyncio.StreamReader) -> bytes:
    """The body of a response that is not streamed."""
    head = await reader.readuntil(b"\r\n\r\n")
    return await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]))


async def text_of(reader: asyncio.StreamReader) -> str:
    """The text of a completion that is not streamed."""
    text: str = json.loads(await body_of(reader))["choices"][0]["text"]
    return text


# Requests one after another


@pytest.mark.parametrize("cuts", [(), (20,), (-3,), (20, -3)], ids=str)
def test_next_request_is_answered_however_the_first_one_was_split(cuts: tuple[int, ...]) -> None:
    async def test() -> None:
        message, go = raw_post(COMPLETIONS, STREAMED), asyncio.Event()
        starts = [0, *(cut % len(message) for cut in cuts)]
        async with serving(Scripts(Script("a", go, "b"), Script("c"))) as server:
            reader, writer = await server.connect()
            for start, end in zip(starts, [*starts[1:], len(message)], strict=True):
                writer.write(message[start:end])
                await answer_another(server)  # So that it arrives in a read of its own.
            await reader.readuntil(b'"text":"a"')

            go.set()

            assert b'"text":"b"' in await reader.readuntil(LAST_CHUNK)
            writer.write(raw_post(COMPLETIONS, UNARY))
            assert await text_of(reader) == "c"

    run(test)


async def answer_another(server: Server) -> bytes:
    """Another client is answered. After that, what was written before has been read."""
    return (await server.get("/live"))[1]


def test_streams_and_other_answers_alternate_on_a_connection() -> None:
    async def test() -> None:
        async with serving(Scripts(Script("a"), Script("b"), Script("a"), Script("b"))) as server:
            reader, writer = await server.connect()
            for _ in range(2):
                writer.write(raw_post(COMPLETIONS, UNARY))
                assert await text_of(reader) == "a"
                writer.write(raw_post(COMPLETIONS, STREAMED))
                assert b'"text":"b"' in await reader.readuntil(LAST_CHUNK)

    run(test)


@pytest.mark.parametrize("cut", [0, 8, len(raw_post(COMPLETIONS, UNARY))], ids=["nothing", "a part", "all"])
def test_pipelined_request_is_answered_after_the_first(cut: int) -> None:
    """`cut`: how many of its bytes come together with the first."""

    async def test() -> None:
        go, behind = asyncio.Event(), raw_post(COMPLETIONS, UNARY)
        async with serving(Scripts(Script("a", go, "b"), Script("c"))) as server:
            reader, writer = await server.connect()
            writer.write(raw_post(COMPLETIONS, STREAMED) + behind[:cut])
            await reader.readuntil(b'"text":"a"')
            writer.write(behind[cut:])
            await answer_another(server)

            go.set()

            assert b'"text":"b"' in await reader.readuntil(LAST_CHUNK)
            assert await text_of(reader) == "c"

    run(test)


def test_pipelined_requests_are_buffered_up_to_the_bound() -> None:
    async def test() -> None:
        go = asyncio.Event()
        more_than_any_kernel_buffers = "x" * 300 * connection.PIPELINED_BYTES_MAX
        large: dict[str, Any] = UNARY | {"prompt": more_than_any_kernel_buffers}
        async with serving(Scripts(Script("a", go), Script("c"))) as server:
            reader, writer = await server.connect()
            writer.write(raw_post(COMPLETIONS, STREAMED))
            await reader.readuntil(b'"text":"a"')
            writer.write(raw_post(COMPLETIONS, large))
            size = -1
            while size != (size := writer.transport.get_write_buffer_size()):
                await asyncio.sleep(0.05)
            assert size > 0

            go.set()

            await reader.readuntil(LAST_CHUNK)
            assert await text_of(reader) == "c"

    run(test)


def test_bug_at_the_end_of_an_answer_costs_no_other_answer() -> None:
    """Bug: it ended the task group of all answers."""

    async def without_usage(request: Request, call: Call, sink: Sink) -> Finish:
        sink.deliver(Delta(0, [1], "x"))
        return Finish(FinishReason.STOP)

    async def test() -> None:
        go = asyncio.Event()
        async with serving(Scripts(Script("a", go, "b"), without_usage)) as server:
            reader, writer = await server.connect()
            writer.write(raw_post(COMPLETIONS, STREAMED))
            await reader.readuntil(b'"text":"a"')
            broken_reader, broken_writer = await server.connect()
            broken_writer.write(raw_post(COMPLETIONS, STREAMED))
            with suppress(ConnectionError):
                assert LAST_CHUNK not in await broken_reader.read()

            go.set()

            assert b'"text":"b"' in await reader.readuntil(LAST_CHUNK)

    run(test)


def test_invalid_bytes_are_refused_after_the_answers_to_earlier_requests() -> None:
    """Bug: the refusal was sent in place of the first answer."""

    async def test() -> None:
        async with serving(Script("a")) as server:
            reader, writer = await server.connect()
            writer.write(raw_post(COMPLETIONS, UNARY) + LIVE + b"no HTTP\r\n\r\n")
            assert await text_of(reader) == "a"
            assert await body_of(reader) == b'{"status":"live"}'
            assert (await reader.read()).startswith(b"HTTP/1.1 400 ")

    run(test)


def test_refusal_of_an_invalid_request_has_its_request_id() -> None:
    async def test() -> None:
        async with serving(Script()) as server:
            reader, writer = await server.connect()
            writer.write(b"GET / HTTP/1.1\r\nX-Request-Id: mine\r\nTransfer-Encoding: x\r\n\r\n")
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")

        assert head.startswith(b"HTTP/1.1 501 ")
        assert b"\r\nX-Request-Id: mine\r\n" in head
        assert error_of(body)["request_id"] == "mine"

    run(test)


def test_bytes_after_the_last_request_do_not_cost_its_answer() -> None:
    async def test() -> None:
        async with serving(Script("a")) as server:
            reader, writer = await server.connect()
            writer.write(raw_post(COMPLETIONS, UNARY, headers="Connection: close\r\n") + LIVE)
            assert await text_of(reader) == "a"
            assert await reader.read() == b""

    run(test)


# What HTTP requires


@pytest.mark.parametrize("cut", [20, -4], ids=["in the head", "before its end"])
@pytest.mark.parametrize("before", [b"", LIVE], ids=["first", "behind another"])
def test_expect_continue_is_answered_however_the_head_is_split(before: bytes, cut: int) -> None:
    """Bug: only a head that came whole and first got the response."""

    async def test() -> None:
        async with serving(Script("a")) as server:
            reader, writer = await server.connect()
            head, _, body = raw_post(COMPLETIONS, UNARY, headers="Expect: 100-continue\r\n").partition(b"\r\n\r\n")
            head += b"\r\n\r\n"
            writer.write(before + head[:cut])
            await answer_another(server)
            writer.write(head[cut:])
            if before:
                assert await body_of(reader) == b'{"status":"live"}'
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(body[:3])
            await answer_another(server)
            writer.write(body[3:])
            assert await text_of(reader) == "a"

    run(test)


def test_expect_continue_of_a_pipelined_request_is_answered() -> None:
    async def test() -> None:
        async with serving(Script("a")) as server:
            reader, writer = await server.connect()
            head, _, body = raw_post(COMPLETIONS, UNARY, headers="Expect: 100-continue\r\n").partition(b"\r\n\r\n")
            writer.write(LIVE + head + b"\r\n\r\n")
            assert await body_of(reader) == b'{"status":"live"}'
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(body)
            assert await text_of(reader) == "a"

    run(test)


def test_expect_continue_is_answered_before_the_body() -> None:
    async def test() -> None:
        async with serving(Script("a")) as server:
            reader, writer = await server.connect()
            head, _, body = raw_post(COMPLETIONS, UNARY, headers="Expect: 100-continue\r\n").partition(b"\r\n\r\n")
            writer.write(head + b"\r\n\r\n")
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(body)
            assert await text_of(reader) == "a"

    run(test)


def test_http_1_0_connection_stays_open_only_if_the_client_asks() -> None:
    async def test() -> None:
        async with serving(Script("a")) as server:
            reader, writer = await server.connect()
            for _ in range(2):
                writer.write(b"GET /live HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
                assert await body_of(reader)
            writer.write(b"GET /live HTTP/1.0\r\n\r\n")
            assert (await reader.read()).endswith(b'{"status":"live"}')

    run(test)


def test_head_is_answered_as_get_without_the_body() -> None:
    async def test() -> None:
        async with serving(Script()) as server:
            reader, writer = await server.connect()
            writer.write(LIVE.replace(b"GET", b"HEAD") + LIVE)
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"Content-Length: 17\r\n" in head
            assert await body_of(reader) == b'{"status":"live"}'

    run(test)


def test_refused_body_is_read_until_the_client_has_seen_the_response() -> None:
    """Closing a connection with unread data resets it, and the response may be lost."""

    async def test() -> None:
        async with serving(Script(), config=HttpConfig(body_bytes_max=1000)) as server:
            reader, writer = await server.connect()
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50000000\r\n\r\n")
            for _ in range(50):
                writer.write(b"x" * 1_000_000)
                await writer.drain()
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")

        assert b" 413 " in head
        assert b"\r\nConnection: close" in head
        assert error_of(body)["code"] == "BODY_TOO_LARGE"

    run(test)


def test_client_that_sends_on_after_its_time_sees_the_response() -> None:
    async def test() -> None:
        async with serving(Script(), config=HttpConfig(body_read_s_max=0.02)) as server:
            reader, writer = await server.connect()
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50000000\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            for _ in range(20):
                writer.write(b"x" * 1_000_000)
                await writer.drain()
            assert error_of(await reader.read())["code"] == "DEADLINE_EXCEEDED"

    run(test)


def test_client_that_sends_an_endless_head_sees_the_response() -> None:
    async def test() -> None:
        async with serving(Script()) as server:
            reader, writer = await server.connect()
            writer.write(b"GET / HTTP/1.1\r\nA: ")
            for _ in range(50):
                writer.write(b"x" * 1_000_000)
                await writer.drain()
            assert (await reader.read()).startswith(b"HTTP/1.1 431 ")

    run(test)


# Bounds


async def read_until_closed(server: Server, sent: bytes) -> bytes:
    """What a client gets that sends `sent` and then nothing, until its connection ends."""
    reader, writer = await server.connect()
    writer.write(sent)
    return await reader.read()


class Clock:
    """The clock of idle connections. It moves only by `advance`."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def __call__(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        self._now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of idle connections, which are checked all the time."""
    clock = Clock()
    monkeypatch.setattr(clients, "clock", clock)
    monkeypatch.setattr(clients, "IDLE_CHECK_S", 0.01)
    return clock


@pytest.mark.parametrize("sent", [b"", LIVE], ids=["new", "answered"])
def test_idle_connection_is_closed(sent: bytes, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor_module, "FIRST_BYTES_S", 0.01)

    async def test() -> None:
        async with serving(Script(), config=HttpConfig(keepalive_s=60)) as server:
            reader, writer = await server.connect()
            if sent:
                writer.write(sent)
                await body_of(reader)
            while not len(server.clients):
                await asyncio.sleep(0)
            clock.advance(61)
            assert await reader.read() == b""
            assert len(server.clients) == 0

    run(test)


def test_connection_with_a_stream_is_not_idle(clock: Clock) -> None:
    async def test() -> None:
        go = asyncio.Event()
        async with serving(Script("a", go), config=HttpConfig(keepalive_s=60)) as server:
            reader, writer = await server.connect()
            writer.write(raw_post(COMPLETIONS, STREAMED))
            await reader.readuntil(b'"text":"a"')
            idle_reader, idle_writer = await server.connect()
            idle_writer.write(LIVE)
            await body_of(idle_reader)
            clock.advance(61)
            assert await idle_reader.read() == b""
            go.set()
            await reader.readuntil(LAST_CHUNK)

    run(test)


@pytest.mark.parametrize(
    ("sent", "status"),
    [(b"POST /v1/compl", 408), (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{", 504)],
    ids=["head", "body"],
)
def test_incomplete_request_is_refused_after_its_time(sent: bytes, status: int) -> None:
    async def test() -> None:
        async with serving(Script(), config=HttpConfig(body_read_s_max=0.02)) as server:
            head, _, body = (await read_until_closed(server, sent)).partition(b"\r\n\r\n")

        assert b" %d " % status in head.split(b"\r\n")[0]
        assert "within 0.02 s" in error_of(body)["message"]

    run(test)


def test_refused_client_that_sends_on_is_disconnected() -> None:
    async def test() -> None:
        async with serving(Script(), config=HttpConfig(lingering_s_max=0.05)) as server:
            reader, _ = await server.connect()
            server.writers[0].write(b"no HTTP\r\n\r\n")
            await reader.read()
            while len(server.clients):
                server.writers[0].write(b"more")
                await asyncio.sleep(0.005)

    run(test)


def test_incomplete_pipelined_request_is_refused_after_its_time() -> None:
    """Bug: it was not seen, and its connection was taken for idle."""

    async def test() -> None:
        async with serving(Script(), config=HttpConfig(body_read_s_max=0.02)) as server:
            answers = await read_until_closed(server, LIVE + b"POST /v1/compl")

        assert answers.count(b"HTTP/1.1 408 ") == 1

    run(test)


def test_line_ends_do_not_keep_an_idle_connection_open(clock: Clock) -> None:
    """Old clients send a line end after a body. It is not a request, and nothing is refused."""

    async def test() -> None:
        async with serving(Script(), config=HttpConfig(keepalive_s=60, body_read_s_max=0.02)) as server:
            reader, writer = await server.connect()
            writer.write(LIVE + b"\r\n")
            await body_of(reader)
            while len(server.clients):
                writer.write(b"\r\n")
                clock.advance(1)
                await asyncio.sleep(0.005)
            with suppress(ConnectionError):  # The last line end may have come after the close.
                assert await reader.read() == b""

    run(test)


@pytest.mark.parametrize("sent", [LIVE, LIVE + b"POST", b"no HTTP\r\n\r\n", raw_post(COMPLETIONS, STREAMED)], ids=str)
def test_parser_of_a_lost_connection_is_freed_without_the_garbage_collector(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parser and its callbacks form a reference cycle."""

    class Watched(RequestParser):
        __slots__ = ("__weakref__",)

    made: list[weakref.ref[RequestParser]] = []

    def make(bytes_max: int, on_head: Callable[[HttpRequest], None]) -> RequestParser:
        made.append(weakref.ref(reader := Watched(bytes_max, on_head)))
        return reader

    monkeypatch.setattr(connection, "RequestParser", make)

    async def test() -> None:
        async with serving(Script("a")) as server:
            reader, writer = await server.connect()
            writer.write(sent)
            await reader.readuntil(b"\r\n\r\n")
            writer.close()
            while len(server.clients):
                await asyncio.sleep(0.001)
            while made[0]() is not None:  # The event loop refers to it for some iterations.
                await asyncio.sleep(0.001)

    gc.disable()
    try:
        run(test)
    finally:
        gc.enable()


# Disconnects and closing


@pytest.mark.parametrize("steps", [(HANG,), ("a", HANG)], ids=["nothing sent", "a stream"])
def test_request_of_a_client_that_disconnects_is_cancelled(steps: tuple[Any, ...]) -> None:
    async def test() -> None:
        pipeline = Script(*steps)
        async with serving(pipeline) as server:
            _, writer = await server.connect()
            writer.write(raw_post(COMPLETIONS, STREAMED))
            await pipeline.running.wait()

            writer.close()

            await pipeline.cancelled.wait()

    run(test)


@pytest.mark.parametrize("run_loop", [asyncio.run, run_on_loop])
def test_client_that_disconnects_during_its_last_answer_causes_no_error(run_loop: Callable[[Any], None]) -> None:
    async def test() -> None:
        go = asyncio.Event()
        pipeline = Script(go, "a")
        with capture_logs() as logs:
            async with serving(pipeline) as server, asyncio.timeout(WAIT_S):
                with socket.create_connection(("127.0.0.1", server.port)) as client:
                    client.sendall(raw_post(COMPLETIONS, UNARY, headers="Connection: close\r\n") + LIVE)
                    await pipeline.running.wait()
                    go.set()
                while len(server.clients):
                    await asyncio.sleep(0)

        assert [line for line in logs if line["log_level"] == "error"] == []

    run_loop(test())


def test_request_of_a_client_that_disconnects_before_it_starts_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        script = Script("a", HANG)
        async with serving(script) as server:
            held: list[Callable[[], None]] = []
            monkeypatch.setattr(server.context.start_limiter, "start", held.append)
            _, writer = await server.connect()
            writer.write(raw_post(COMPLETIONS, STREAMED))
            while not held:
                await asyncio.sleep(0)
            writer.close()
            while len(server.clients):
                await asyncio.sleep(0.001)

            held[0]()

            await answer_another(server)
            assert not script.requests

    run(test)


@pytest.mark.parametrize("ends", [True, False], ids=["ends", "hangs"])
def test_closing_server_lets_answers_end_within_a_bound(ends: bool) -> None:
    async def test() -> None:
        go = asyncio.Event()
        pipeline = Script("a", go)
        async with serving(pipeline, config=HttpConfig(shutdown_s_max=WAIT_S if ends else 0.05)) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)  # Open until the end.
            writer.write(raw_post(COMPLETIONS, STREAMED))
            await reader.readuntil(b'"text":"a"')
            if ends:
                asyncio.get_running_loop().call_later(0.05, go.set)
        rest = b""
        with suppress(ConnectionError):
            rest = await reader.read()
        writer.close()

        assert pipeline.cancelled.is_set() is not ends
        assert rest.endswith(LAST_CHUNK) is ends

    run(test)


@pytest.mark.parametrize("behind", [b"", LIVE], ids=["alone", "pipelined"])
def test_request_that_waits_for_its_turn_while_the_server_closes_may_be_sent_again(behind: bytes) -> None:
    """Bug: its connection was closed without an answer."""

    async def test() -> None:
        pipeline = Script("a")
        async with serving(pipeline) as server:
            reader, writer = await server.connect()
            server.context.start_limiter._left = 0  # Nothing starts any more.
            writer.write(raw_post(COMPLETIONS, UNARY, headers="X-Request-Id: mine\r\n") + behind)
            while [one.state for one in server.clients._open if isinstance(one, Connection)] != ["answering"]:
                await asyncio.sleep(0)

            await server.clients.close(0)

            head = await reader.readuntil(b"\r\n\r\n")
            error = json.loads(await reader.read())["error"]
            assert head.startswith(b"HTTP/1.1 503 ")
            assert {b"Connection: close", b"x-should-retry: true", b"X-Request-Id: mine"} <= set(head.split(b"\r\n"))
            assert (error["code"], error["retryable"], error["request_id"]) == ("DRAINING", True, "mine")
            assert not pipeline.requests

    run(test)


def test_stream_keeps_neither_parser_nor_content_of_its_request() -> None:
    async def test() -> None:
        gc.collect()
        gc.disable()  # Freed without a collection.
        try:
            async with serving(Script("a", HANG)) as server:
                reader, writer = await server.connect()
                writer.write(raw_post(COMPLETIONS, STREAMED))
                await reader.readuntil(b'"text":"a"')

                assert not [one for one in gc.get_objects() if isinstance(one, RequestParser)]
                [request] = [one for one in gc.get_objects() if isinstance(one, HttpRequest)]
                assert (request.headers, request.body) == ({}, b"")
        finally:
            gc.enable()

    run(test)
