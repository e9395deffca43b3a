"""A connection: requests take turns on it, none gets lost, and nobody is listened to for longer than the bounds say."""

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
from services.http.server import acceptor as acceptor_module
from services.http.server import connection
from services.http.server.config import HttpConfig
from services.http.server.messages import HttpRequest
from services.http.server.parser import RequestParser
from services.runtime.loop import run_on_loop
from tests.http.support import HANG, TEST_S_MAX, Script, Server, error_of, raw_post, run, serving

UNARY = {"model": "org/tiny", "prompt": "hi"}
STREAMED = UNARY | {"stream": True}
COMPLETIONS = "/v1/completions"
LAST_CHUNK = b"0\r\n\r\n"
LIVE = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"


class Turns:
    """A pipeline that plays a script for each request, the last one again and again."""

    def __init__(self, *scripts: Layer) -> None:
        self.scripts = list(scripts)

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        return await script(request, call, sink)


async def body_of(reader: asyncio.StreamReader) -> bytes:
    """Of a whole answer."""
    head = await reader.readuntil(b"\r\n\r\n")
    return await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]))


async def text_of(reader: asyncio.StreamReader) -> str:
    """Of a unary answer."""
    text: str = json.loads(await body_of(reader))["choices"][0]["text"]
    return text


# Requests behind each other


@pytest.mark.parametrize("cuts", [(), (20,), (-3,), (20, -3)], ids=str)
def test_the_connection_takes_the_next_request_however_the_first_one_came(cuts: tuple[int, ...]) -> None:
    async def test() -> None:
        message, go = raw_post(COMPLETIONS, STREAMED), asyncio.Event()
        starts = [0, *(cut % len(message) for cut in cuts)]
        async with serving(Turns(Script("a", go, "b"), Script("c"))) as server:
            reader, writer = await server.connect()
            for start, end in zip(starts, [*starts[1:], len(message)], strict=True):
                writer.write(message[start:end])
                await body_of_another(server)  # So that it comes as a piece of its own.
            await reader.readuntil(b'"text":"a"')

            go.set()

            assert b'"text":"b"' in await reader.readuntil(LAST_CHUNK)
            writer.write(raw_post(COMPLETIONS, UNARY))
            assert await text_of(reader) == "c"

    run(test)


async def body_of_another(server: Server) -> bytes:
    """Somebody else is answered meanwhile, and so what was written before has come."""
    return (await server.get("/live"))[1]


def test_streams_and_other_answers_take_turns_on_a_connection() -> None:
    async def test() -> None:
        async with serving(Turns(Script("a"), Script("b"), Script("a"), Script("b"))) as server:
            reader, writer = await server.connect()
            for _ in range(2):
                writer.write(raw_post(COMPLETIONS, UNARY))
                assert await text_of(reader) == "a"
                writer.write(raw_post(COMPLETIONS, STREAMED))
                assert b'"text":"b"' in await reader.readuntil(LAST_CHUNK)

    run(test)


@pytest.mark.parametrize("cut", [0, 8, len(raw_post(COMPLETIONS, UNARY))], ids=["nothing", "a part", "all"])
def test_a_request_behind_another_is_answered_after_it(cut: int) -> None:
    """cut: how much of it comes together with the first."""

    async def test() -> None:
        go, behind = asyncio.Event(), raw_post(COMPLETIONS, UNARY)
        async with serving(Turns(Script("a", go, "b"), Script("c"))) as server:
            reader, writer = await server.connect()
            writer.write(raw_post(COMPLETIONS, STREAMED) + behind[:cut])
            await reader.readuntil(b'"text":"a"')
            writer.write(behind[cut:])
            await body_of_another(server)

            go.set()

            assert b'"text":"b"' in await reader.readuntil(LAST_CHUNK)
            assert await text_of(reader) == "c"

    run(test)


def test_what_comes_before_the_answer_is_sent_is_read_no_further_than_the_bound() -> None:
    async def test() -> None:
        go = asyncio.Event()
        large: dict[str, Any] = UNARY | {"prompt": "x" * 300 * connection.AHEAD_BYTES_MAX}  # No kernel holds so much.
        async with serving(Turns(Script("a", go), Script("c"))) as server:
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


def test_a_bug_at_the_end_of_an_answer_harms_no_other() -> None:
    """It ended the group of all of them."""

    async def without_usage(request: Request, call: Call, sink: Sink) -> Finish:
        sink.deliver(Delta(0, [1], "x"))
        return Finish(FinishReason.STOP)

    async def test() -> None:
        go = asyncio.Event()
        async with serving(Turns(Script("a", go, "b"), without_usage)) as server:
            reader, writer = await server.connect()
            writer.write(raw_post(COMPLETIONS, STREAMED))
            await reader.readuntil(b'"text":"a"')
            broken_reader, broken_writer = await server.connect()
            broken_writer.write(raw_post(COMPLETIONS, STREAMED))
            with suppress(ConnectionResetError):
                assert LAST_CHUNK not in await broken_reader.read()

            go.set()

            assert b'"text":"b"' in await reader.readuntil(LAST_CHUNK)

    run(test)


def test_what_is_no_request_is_refused_after_the_answers_before_it() -> None:
    """The refusal stood in the place of the first answer."""

    async def test() -> None:
        async with serving(Script("a")) as server:
            reader, writer = await server.connect()
            writer.write(raw_post(COMPLETIONS, UNARY) + LIVE + b"no HTTP\r\n\r\n")
            assert await text_of(reader) == "a"
            assert await body_of(reader) == b'{"status":"live"}'
            assert (await reader.read()).startswith(b"HTTP/1.1 400 ")

    run(test)


def test_what_is_no_request_has_the_id_that_it_came_with() -> None:
    async def test() -> None:
        async with serving(Script()) as server:
            reader, writer = await server.connect()
            writer.write(b"GET / HTTP/1.1\r\nX-Request-Id: mine\r\nTransfer-Encoding: x\r\n\r\n")
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")

        assert head.startswith(b"HTTP/1.1 501 ")
        assert b"\r\nX-Request-Id: mine\r\n" in head
        assert error_of(body)["request_id"] == "mine"

    run(test)


def test_what_follows_a_last_request_does_not_cost_its_answer() -> None:
    async def test() -> None:
        async with serving(Script("a")) as server:
            reader, writer = await server.connect()
            writer.write(raw_post(COMPLETIONS, UNARY, headers="Connection: close\r\n") + LIVE)
            assert await text_of(reader) == "a"
            assert await reader.read() == b""

    run(test)


# What HTTP asks of a server


@pytest.mark.parametrize("cut", [20, -4], ids=["in the head", "before its end"])
@pytest.mark.parametrize("before", [b"", LIVE], ids=["first", "behind another"])
def test_who_waits_for_leave_is_given_it_however_the_head_comes(before: bytes, cut: int) -> None:
    """Only a head that came at once, with nothing before it, was heard."""

    async def test() -> None:
        async with serving(Script("a")) as server:
            reader, writer = await server.connect()
            head, _, body = raw_post(COMPLETIONS, UNARY, headers="Expect: 100-continue\r\n").partition(b"\r\n\r\n")
            head += b"\r\n\r\n"
            writer.write(before + head[:cut])
            await body_of_another(server)
            writer.write(head[cut:])
            if before:
                assert await body_of(reader) == b'{"status":"live"}'
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(body[:3])
            await body_of_another(server)
            writer.write(body[3:])
            assert await text_of(reader) == "a"

    run(test)


def test_who_waits_for_leave_behind_another_request_is_given_it() -> None:
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


def test_who_waits_for_leave_to_send_a_body_is_given_it() -> None:
    async def test() -> None:
        async with serving(Script("a")) as server:
            reader, writer = await server.connect()
            head, _, body = raw_post(COMPLETIONS, UNARY, headers="Expect: 100-continue\r\n").partition(b"\r\n\r\n")
            writer.write(head + b"\r\n\r\n")
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(body)
            assert await text_of(reader) == "a"

    run(test)


def test_http_1_0_keeps_a_connection_that_its_client_wants_kept() -> None:
    async def test() -> None:
        async with serving(Script("a")) as server:
            reader, writer = await server.connect()
            for _ in range(2):
                writer.write(b"GET /live HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
                assert await body_of(reader)
            writer.write(b"GET /live HTTP/1.0\r\n\r\n")
            assert (await reader.read()).endswith(b'{"status":"live"}')

    run(test)


def test_head_is_get_without_the_body() -> None:
    async def test() -> None:
        async with serving(Script()) as server:
            reader, writer = await server.connect()
            writer.write(LIVE.replace(b"GET", b"HEAD") + LIVE)
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"Content-Length: 17\r\n" in head
            assert await body_of(reader) == b'{"status":"live"}'

    run(test)


def test_a_refused_body_is_taken_until_its_client_has_seen_why() -> None:
    """A connection that is closed with something unread is reset, and the answer may be lost with it."""

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


def test_who_is_too_slow_and_sends_on_sees_why() -> None:
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


def test_who_sends_a_head_without_end_sees_why() -> None:
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


async def is_closed(server: Server, said: bytes) -> bytes:
    """What a client gets who says so much and then nothing, until its connection ends."""
    reader, writer = await server.connect()
    writer.write(said)
    return await reader.read()


class Clock:
    """The server's, as far as idle connections go: it stands still but for `advance`."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def __call__(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        self._now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """With connections that are looked at all the time."""
    clock = Clock()
    monkeypatch.setattr(connection, "clock", clock)
    monkeypatch.setattr(connection, "IDLE_LOOK_S", 0.01)
    return clock


@pytest.mark.parametrize("said", [b"", LIVE], ids=["new", "answered"])
def test_an_idle_connection_is_closed(said: bytes, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor_module, "SILENT_S", 0.01)

    async def test() -> None:
        async with serving(Script(), config=HttpConfig(keepalive_s=60)) as server:
            reader, writer = await server.connect()
            if said:
                writer.write(said)
                await body_of(reader)
            while not len(server.clients):
                await asyncio.sleep(0)
            clock.advance(61)
            assert await reader.read() == b""
            assert len(server.clients) == 0

    run(test)


def test_a_connection_with_a_stream_is_not_idle(clock: Clock) -> None:
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
    ("said", "status"),
    [(b"POST /v1/compl", 408), (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{", 504)],
    ids=["head", "body"],
)
def test_a_request_that_does_not_arrive_is_not_waited_for_beyond_the_bound(said: bytes, status: int) -> None:
    async def test() -> None:
        async with serving(Script(), config=HttpConfig(body_read_s_max=0.02)) as server:
            head, _, body = (await is_closed(server, said)).partition(b"\r\n\r\n")

        assert b" %d " % status in head.split(b"\r\n")[0]
        assert "within 0.02 s" in error_of(body)["message"]

    run(test)


def test_who_is_refused_and_does_not_leave_is_left() -> None:
    async def test() -> None:
        async with serving(Script(), config=HttpConfig(lingering_s_max=0.05)) as server:
            reader, _ = await server.connect()
            server.writers[0].write(b"no HTTP\r\n\r\n")
            await reader.read()
            while len(server.clients):
                server.writers[0].write(b"more")
                await asyncio.sleep(0.005)

    run(test)


def test_a_request_that_began_behind_another_is_not_waited_for_beyond_the_bound() -> None:
    """It was taken for no request at all, and its connection for idle."""

    async def test() -> None:
        async with serving(Script(), config=HttpConfig(body_read_s_max=0.02)) as server:
            answers = await is_closed(server, LIVE + b"POST /v1/compl")

        assert answers.count(b"HTTP/1.1 408 ") == 1

    run(test)


def test_ends_of_lines_keep_no_idle_connection_open(clock: Clock) -> None:
    """Old clients send one after a body. It is no request, so nothing is refused either."""

    async def test() -> None:
        async with serving(Script(), config=HttpConfig(keepalive_s=60, body_read_s_max=0.02)) as server:
            reader, writer = await server.connect()
            writer.write(LIVE + b"\r\n")
            await body_of(reader)
            while len(server.clients):
                writer.write(b"\r\n")
                clock.advance(1)
                await asyncio.sleep(0.005)
            with suppress(ConnectionResetError):  # The last of them may have come too late.
                assert await reader.read() == b""

    run(test)


@pytest.mark.parametrize("said", [LIVE, LIVE + b"POST", b"no HTTP\r\n\r\n", raw_post(COMPLETIONS, STREAMED)], ids=str)
def test_a_connection_that_is_lost_is_not_left_to_the_garbage_collector(
    said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parser and what it calls hold each other."""

    class Watched(RequestParser):
        __slots__ = ("__weakref__",)

    made: list[weakref.ref[RequestParser]] = []

    def make(bytes_max: int) -> RequestParser:
        made.append(weakref.ref(reader := Watched(bytes_max)))
        return reader

    monkeypatch.setattr(connection, "RequestParser", make)

    async def test() -> None:
        async with serving(Script("a")) as server:
            reader, writer = await server.connect()
            writer.write(said)
            await reader.readuntil(b"\r\n\r\n")
            writer.close()
            while len(server.clients):
                await asyncio.sleep(0.001)
            while made[0]() is not None:  # The loop holds it for some turns.
                await asyncio.sleep(0.001)

    gc.disable()
    try:
        run(test)
    finally:
        gc.enable()


# Leaving and closing


@pytest.mark.parametrize("steps", [(HANG,), ("a", HANG)], ids=["nothing sent", "a stream"])
def test_a_client_that_leaves_has_its_request_cancelled(steps: tuple[Any, ...]) -> None:
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
def test_a_client_that_leaves_as_it_is_answered_for_the_last_time_is_no_bug(run_loop: Callable[[Any], None]) -> None:
    async def test() -> None:
        go = asyncio.Event()
        pipeline = Script(go, "a")
        with capture_logs() as logs:
            async with serving(pipeline) as server, asyncio.timeout(TEST_S_MAX):
                with socket.create_connection(("127.0.0.1", server.port)) as client:
                    client.sendall(raw_post(COMPLETIONS, UNARY, headers="Connection: close\r\n") + LIVE)
                    await pipeline.running.wait()
                    go.set()
                while len(server.clients):
                    await asyncio.sleep(0)

        assert [line for line in logs if line["log_level"] == "error"] == []

    run_loop(test())


def test_a_client_that_leaves_before_its_turn_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        script = Script("a", HANG)
        async with serving(script) as server:
            held: list[Callable[[], None]] = []
            monkeypatch.setattr(server.clients.start_limiter, "take", held.append)
            _, writer = await server.connect()
            writer.write(raw_post(COMPLETIONS, STREAMED))
            while not held:
                await asyncio.sleep(0)
            writer.close()
            while len(server.clients):
                await asyncio.sleep(0.001)

            held[0]()

            await body_of_another(server)
            assert not script.requests

    run(test)


@pytest.mark.parametrize("ends", [True, False], ids=["ends", "hangs"])
def test_when_the_server_closes_an_answer_may_end_in_time_and_is_then_cut(ends: bool) -> None:
    async def test() -> None:
        go = asyncio.Event()
        pipeline = Script("a", go)
        async with serving(pipeline, config=HttpConfig(shutdown_s_max=TEST_S_MAX if ends else 0.05)) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)  # It stays until the end.
            writer.write(raw_post(COMPLETIONS, STREAMED))
            await reader.readuntil(b'"text":"a"')
            if ends:
                asyncio.get_running_loop().call_later(0.05, go.set)
        rest = b""
        with suppress(ConnectionResetError):
            rest = await reader.read()
        writer.close()

        assert pipeline.cancelled.is_set() is not ends
        assert rest.endswith(LAST_CHUNK) is ends

    run(test)


def test_of_a_stream_nothing_is_kept_that_only_its_request_needed() -> None:
    async def test() -> None:
        gc.collect()
        gc.disable()  # It is let go of, not collected.
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
