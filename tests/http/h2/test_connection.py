"""A connection over HTTP/2 answers many requests at a time, as HTTP/1.1 answers them one after another."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from grpc import StatusCode

from services.core.errors import Reason
from services.core.flow.client_flow import ClientBounds
from services.http.h2 import connection as connection_module
from services.http.h2.bounds import keepalive
from services.http.h2.bounds.keepalive import Keepalive
from services.http.h2.connection import DRAIN_PING, H2Connection
from services.http.h2.flow_control import STREAM_WINDOW_BYTES
from services.http.h2.settings import STREAMS_MAX
from services.http.h2.wire.frames import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    LARGEST_STREAM_ID,
    PING,
    WINDOW_UPDATE,
    ErrorCode,
    frame,
    rst_stream,
    window_update,
)
from services.http.h2.writer import FrameWriter
from services.http.server.config import PROBE_RPC, HttpConfig
from tests.http.grpc.support import EMPTY_CALL, INPUT_CALL, error_in, message, raw_client, serving_rpcs
from tests.http.grpc.support import HEADERS as RPC
from tests.http.h2.support import (
    COMPLETION,
    COMPLETIONS,
    STREAMED,
    Client,
    connected,
    connection_of,
    settings,
)
from tests.http.support import HANG, Script, StubFrontend, error_of, events, run, serving
from tests.support.clock import WAIT_S


def texts(body: bytes) -> str:
    return "".join(event["choices"][0]["text"] for event in events(body)[:-1] if event["choices"])


# Requests and answers


def test_answers_a_request_with_the_same_body_as_over_http_1() -> None:
    async def test() -> None:
        async with serving(Script("hello")) as server, connected(server) as client:
            _, over_http_1 = await server.post(COMPLETIONS, COMPLETION, headers={"X-Request-Id": "r-1"})
            answer = await client.answer(client.post(COMPLETIONS, COMPLETION, {"x-request-id": "r-1"}))

        assert answer.status == 200
        assert answer.json | {"created": 0} == json.loads(over_http_1) | {"created": 0}
        assert answer.headers["x-request-id"] == "r-1"
        assert answer.headers["content-length"] == str(len(answer.body))

    run(test)


def test_streams_events() -> None:
    async def test() -> None:
        more = asyncio.Event()
        async with serving(Script("one", more, "two")) as server, connected(server) as client:
            stream_id = client.post(COMPLETIONS, STREAMED)
            await client.until(lambda: b"one" in client.answers[stream_id].body)
            more.set()
            answer = await client.answer(stream_id)

        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert texts(answer.body) == "onetwo"
        assert answer.body.endswith(b"data: [DONE]\n\n")

    run(test)


def test_failure_has_its_status() -> None:
    async def test() -> None:
        async with serving(Script(Reason.OVERLOADED)) as server, connected(server) as client:
            answer = await client.answer(client.post(COMPLETIONS, STREAMED))

        assert answer.status == 503
        assert answer.headers["retry-after"] == "2"
        assert error_of(answer.body)["code"] == "OVERLOADED"

    run(test)


def test_head_has_no_body() -> None:
    async def test() -> None:
        async with serving(Script()) as server, connected(server) as client:
            answer = await client.answer(client.open("/live", method="HEAD", ends=True))

        assert (answer.status, answer.body) == (200, b"")
        assert int(answer.headers["content-length"]) > 0

    run(test)


def test_answer_without_content_has_no_length() -> None:
    async def test() -> None:
        async with serving(Script()) as server, connected(server) as client:
            path, headers = "/v1/streams/" + "0" * 32, {"last-event-id": "done"}
            answer = await client.answer(client.open(path, headers, "GET", ends=True))

        assert (answer.status, answer.body) == (204, b"")
        assert "content-length" not in answer.headers

    run(test)


def test_requests_of_one_connection_do_not_wait_for_each_other() -> None:
    async def test() -> None:
        async with serving(Script(HANG)) as server, connected(server) as client:
            client.post(COMPLETIONS, STREAMED)

            answer = await client.answer(client.get("/live"))

        assert answer.status == 200

    run(test)


@pytest.mark.parametrize(("host", "status"), [("X", 200), ("y", 400)])
def test_host_that_differs_from_the_authority_is_refused(host: str, status: int) -> None:
    """Proxies go by the one, and applications by the other."""

    async def test() -> None:
        async with serving(Script()) as server, connected(server) as client:
            answer = await client.answer(client.open("/live", {"host": host}, "GET", ends=True))
            beside = await client.answer(client.get("/live"))

        assert (answer.status, beside.status) == (status, 200)
        if status == 400:
            assert error_of(answer.body)["message"] == "host is 'y' and :authority is 'x': send one of them"

    run(test)


def test_host_of_an_rpc_that_differs_from_the_authority_is_refused() -> None:
    async def test() -> None:
        async with serving_rpcs() as rpcs, raw_client(rpcs) as client:
            answer = await client.answer(client.post(EMPTY_CALL, message(b""), RPC | {"host": "y"}))

        assert answer.headers["grpc-status"] == str(StatusCode.INTERNAL.value[0])
        assert error_in(answer.headers).reason == Reason.INVALID_ARGUMENT

    run(test)


def test_trailers_of_a_request_are_ignored() -> None:
    async def test() -> None:
        async with serving(Script("hello")) as server, connected(server) as client:
            stream_id = client.open(COMPLETIONS, ends=False)
            client.send(frame(DATA, 0, stream_id, json.dumps(COMPLETION).encode()))
            client.send(frame(HEADERS, END_HEADERS | END_STREAM, stream_id, client.encode([("x-checksum", "1")])))

            answer = await client.answer(stream_id)

        assert answer.json["choices"][0]["text"] == "hello"

    run(test)


# Content of requests


def test_body_above_the_bound_is_refused_before_it_has_come() -> None:
    async def test() -> None:
        config = HttpConfig(body_bytes_max=1000, lingering_s_max=0.1)
        async with serving(Script("hello"), config=config) as server, connected(server) as client:
            said = client.open(COMPLETIONS, {"content-length": "1001"}, ends=False)
            sent = client.open(COMPLETIONS, ends=False)
            client.send(frame(DATA, 0, sent, bytes(1001)))

            for stream_id in (said, sent):
                answer = await client.answer(stream_id)
                assert (answer.status, answer.has_ended, answer.reset) == (413, True, None)
            await client.until(
                lambda: client.answers[said].reset is not None and client.answers[sent].reset is not None
            )
            assert client.answers[said].reset is ErrorCode.NO_ERROR, "the rest is not needed"
            assert (await client.answer(client.get("/live"))).status == 200

    run(test)


def test_rest_of_a_refused_request_is_discarded() -> None:
    """Bug: a reset followed at once, and clients that read after they have sent everything reported that alone."""

    async def test() -> None:
        config = HttpConfig(body_bytes_max=1000)
        async with serving(Script("hello"), config=config) as server, connected(server) as client:
            stream_id = client.open(COMPLETIONS, ends=False)

            await send_within_the_window(client, stream_id, 3 * STREAM_WINDOW_BYTES)
            client.send(frame(DATA, END_STREAM, stream_id))

            answer = await client.answer(stream_id)
            assert (await client.answer(client.get("/live"))).status == 200
            assert (answer.status, answer.has_ended, answer.reset) == (413, True, None)
            connection = connection_of(server)
            assert (len(connection._frames.streams), connection.bodies_size) == (0, 0)

    run(test)


def test_bodies_of_a_connection_together_are_bounded() -> None:
    async def test() -> None:
        config = HttpConfig(body_bytes_max=1000)
        async with serving(Script("hello"), config=config) as server, connected(server) as client:
            first, second = client.open(COMPLETIONS, ends=False), client.open(COMPLETIONS, ends=False)
            client.send(frame(DATA, 0, first, bytes(600)), frame(DATA, 0, second, bytes(600)))

            answer = await client.answer(second)

            assert answer.reset is ErrorCode.REFUSED_STREAM, "it may be sent again"
            client.send(rst_stream(first, ErrorCode.CANCEL))
            assert (await client.answer(client.post(COMPLETIONS, COMPLETION))).status == 200
            assert connection_of(server).bodies_size == 0

    run(test)


def test_body_that_does_not_arrive_in_time_is_answered() -> None:
    async def test() -> None:
        config = HttpConfig(body_read_s_max=0.05)
        async with serving(Script("hello"), config=config) as server, connected(server) as client:
            answer = await client.answer(client.open(COMPLETIONS, ends=False))

        assert answer.status == 504

    run(test)


def test_window_opens_as_content_arrives() -> None:
    async def test() -> None:
        async with serving(Script("hello")) as server, connected(server) as client:
            stream_id = client.open("/v1/completions", ends=False)

            await send_within_the_window(client, stream_id, 3 * STREAM_WINDOW_BYTES)
            client.send(frame(DATA, END_STREAM, stream_id, json.dumps(COMPLETION).encode()))

            assert (await client.answer(stream_id)).status == 200

    run(test)


async def send_within_the_window(client: Client, stream_id: int, size: int) -> None:
    """Send blanks, as the window of the stream allows."""
    left = STREAM_WINDOW_BYTES
    sent = 0
    while sent < size:
        while left >= 16_384:
            client.send(frame(DATA, 0, stream_id, b" " * 16_384))
            left, sent = left - 16_384, sent + 16_384
        before = len(client.seen)
        await client.read()
        left += sum(
            int.from_bytes(one.payload, "big")
            for one in client.seen[before:]
            if one.kind == WINDOW_UPDATE and one.stream_id == stream_id
        )


def test_client_that_passes_the_window_of_a_stream_is_reset() -> None:
    async def test() -> None:
        async with serving_rpcs() as rpcs, raw_client(rpcs) as client:

            async def hang(requests: Any, context: Any) -> None:
                await asyncio.Event().wait()

            rpcs.routes.methods[INPUT_CALL].behaviour = hang
            stream_id = client.open(INPUT_CALL, RPC, ends=False)
            for _ in range(STREAM_WINDOW_BYTES // 16_384 + 1):
                client.send(frame(DATA, 0, stream_id, message(bytes(16_379))))
            answer = await client.answer(stream_id)

        assert answer.reset is ErrorCode.FLOW_CONTROL_ERROR

    run(test)


# Clients that leave


def test_reset_cancels_the_request_alone() -> None:
    async def test() -> None:
        script = Script("a", HANG)
        async with serving(script) as server, connected(server) as client:
            stream_id = client.post(COMPLETIONS, STREAMED)
            await script.running.wait()

            client.send(rst_stream(stream_id, ErrorCode.CANCEL))

            await script.cancelled.wait()
            assert (await client.answer(client.get("/live"))).status == 200
            assert not connection_of(server).tasks

    run(test)


def test_disconnect_cancels_all_requests() -> None:
    async def test() -> None:
        script = Script("a", HANG)
        async with serving(script) as server:
            async with connected(server) as client:
                for _ in range(3):
                    client.post(COMPLETIONS, STREAMED)
                await script.running.wait()
            await script.cancelled.wait()
            while len(server.clients):
                await asyncio.sleep(0.001)

    run(test)


def test_streams_count_as_clients_until_they_end() -> None:
    """Bug: a full garbage collection visited the thousands of streams of a few connections."""

    async def test() -> None:
        script = Script("a", HANG)
        async with serving(script) as server:
            async with connected(server) as client:
                reset, *_ = [client.post(COMPLETIONS, STREAMED) for _ in range(3)]
                await script.running.wait()
                assert (server.clients.held_count, len(server.clients)) == (1 + 3, 1)

                client.send(rst_stream(reset, ErrorCode.CANCEL))
                await client.answer(client.get("/live"))
                await client.answer(client.get("/unknown"))
                assert server.clients.held_count == 1 + 2
            while server.clients.held_count:
                await asyncio.sleep(0.001)

    run(test)


def test_streams_above_the_bound_are_refused_and_may_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with serving(Script(HANG)) as server, connected(server) as client:
            for _ in range(STREAMS_MAX):
                client.open(COMPLETIONS, ends=False)

            answer = await client.answer(client.get("/live"))

        assert answer.reset is ErrorCode.REFUSED_STREAM

    run(test)


# Leaving in two steps


def test_draining_connection_with_rpcs_serves_what_is_on_its_way_and_then_leaves() -> None:
    async def test() -> None:
        async with serving_rpcs() as rpcs, raw_client(rpcs) as client:
            first = client.open(INPUT_CALL, RPC, ends=False)
            await client.answer(client.get("/live"))

            connection_of(rpcs.server).drain()

            await client.until(lambda: client.goaways)
            assert client.goaways == [(LARGEST_STREAM_ID, ErrorCode.NO_ERROR)]
            crossed = client.post(EMPTY_CALL, message(b""), RPC)
            assert (await client.answer(crossed)).trailers["grpc-status"] == "0"
            client.send(frame(PING, ACK, 0, DRAIN_PING))
            await client.until(lambda: len(client.goaways) == 2)
            assert client.goaways[-1] == (crossed, ErrorCode.NO_ERROR)
            late = client.post(EMPTY_CALL, message(b""), RPC)
            client.send(rst_stream(late, ErrorCode.CANCEL))
            client.send(frame(DATA, END_STREAM, first))
            assert (await client.answer(first)).trailers["grpc-status"] == "0"
            await client.end()
            assert client.answers[late].headers == {}, "the client sends it elsewhere"

    run(test)


def test_draining_connection_tells_its_client_after_the_last_answer_over_http() -> None:
    """Bug: programs on Python's library h2 broke their streams when they heard that they should leave."""

    async def test() -> None:
        more, frontend = asyncio.Event(), StubFrontend()
        async with serving(Script("a", more, "b"), catalog=frontend) as server, connected(server) as client:
            first = client.post(COMPLETIONS, STREAMED)
            await client.until(lambda: client.answers[first].body)

            frontend.is_draining = frontend.gate.is_draining = True
            server.clients.drain()

            refused = await client.answer(client.post(COMPLETIONS, COMPLETION))
            assert (refused.status, error_of(refused.body)["code"]) == (503, "DRAINING")
            cancelled = await client.answer(client.post("/v1/requests/unknown/cancel", {}))
            assert cancelled.status == 200, "whoever waits for an answer may cancel it"
            assert client.goaways == []
            more.set()
            answer = await client.answer(first)
            assert texts(answer.body) == "ab"
            await client.until(lambda: client.goaways)
            kinds = [one.kind for one in client.seen if one.stream_id == first or one.kind == GOAWAY]
            assert kinds[-2:] == [DATA, GOAWAY]
            client.send(frame(PING, ACK, 0, DRAIN_PING))
            assert await client.end() is ErrorCode.NO_ERROR

    run(test)


def test_client_that_does_not_answer_the_ping_is_left_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "GOAWAY_S_MAX", 0.01)

    async def test() -> None:
        async with serving(Script()) as server, connected(server) as client:
            await client.answer(client.get("/live"))
            connection_of(server).drain()

            assert await client.end() is ErrorCode.NO_ERROR
            assert len(client.goaways) == 2

    run(test)


def test_answer_of_a_draining_process_makes_the_connection_leave() -> None:
    async def test() -> None:
        frontend = StubFrontend()
        async with serving(Script("a"), catalog=frontend) as server, connected(server) as client:
            frontend.is_draining = True

            answer = await client.answer(client.get("/live"))
            await client.until(lambda: client.goaways)

        assert answer.status == 200

    run(test)


def test_idle_connection_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        config = HttpConfig(keepalive_s=0.05)
        async with serving(Script("a"), config=config) as server, connected(server) as client:
            await client.answer(client.get("/live"))

            await client.until(lambda: client.goaways)
            client.send(frame(PING, ACK, 0, DRAIN_PING))

            assert await client.end() is ErrorCode.NO_ERROR

    run(test)


# The end of the server


def test_requests_that_have_not_begun_may_be_sent_again_when_the_server_closes() -> None:
    """Bug: they got no answer, and their clients could not tell whether they had been run."""

    async def test() -> None:
        script = Script("a", HANG)
        async with serving(script) as server, connected(server) as client:
            running = client.post(COMPLETIONS, STREAMED)
            await script.running.wait()
            server.context.start_limiter.start = lambda _: None  # type: ignore[method-assign, assignment]  # It is nobody's turn.
            waiting = client.post(COMPLETIONS, STREAMED)
            arriving = client.open(COMPLETIONS, ends=False)
            await client.answer(client.get("/live"))

            await server.clients.close(0)

            await client.end()
            assert [client.answers[one].reset for one in (waiting, arriving)] == [ErrorCode.REFUSED_STREAM] * 2
            assert client.answers[running].reset is not ErrorCode.REFUSED_STREAM

    run(test)


def test_request_whose_turn_comes_while_the_server_closes_is_refused_likewise() -> None:
    async def test() -> None:
        script = Script("a", HANG)
        async with serving(script) as server, connected(server) as client:
            client.post(COMPLETIONS, STREAMED)
            await script.running.wait()
            async with asyncio.TaskGroup() as group:
                closing = group.create_task(server.clients.close(WAIT_S))
                while not server.clients.is_closing:
                    await asyncio.sleep(0)
                late = client.post(COMPLETIONS, STREAMED)

                answer = await client.answer(late)

                assert answer.reset is ErrorCode.REFUSED_STREAM
                for task in list(connection_of(server).tasks):
                    task.cancel()
                await closing

    run(test)


@pytest.mark.parametrize("has_rpc", [True, False])
def test_client_is_told_when_the_server_closes(has_rpc: bool) -> None:
    """Bug: with an rpc under way it was not."""

    async def test() -> None:
        async with serving_rpcs() as rpcs, raw_client(rpcs) as client:
            if has_rpc:
                client.open(INPUT_CALL, RPC, ends=False)
            await client.answer(client.get("/live"))

            await rpcs.context.clients.close(0)

            assert await client.end() is ErrorCode.NO_ERROR

    run(test)


# Health checks


@pytest.mark.parametrize("is_rpc", [False, True])
def test_health_check_does_not_wait_for_its_turn_but_those_beside_it_do(is_rpc: bool) -> None:
    """As over HTTP/1.1, where they come one after another."""

    async def test() -> None:
        async with serving_rpcs() as rpcs, raw_client(rpcs) as client:
            rpcs.routes.methods[PROBE_RPC] = rpcs.routes.methods[EMPTY_CALL]
            waiting: list[Callable[[], None]] = []
            rpcs.context.start_limiter.start = waiting.append  # type: ignore[method-assign, assignment]

            def probe() -> int:
                return client.post(PROBE_RPC, message(b""), RPC) if is_rpc else client.get("/live")

            first, second = probe(), probe()
            await client.answer(first)
            assert len(waiting) == 1
            assert second not in client.answers
            await client.answer(probe())
            waiting[0]()
            await client.answer(second)

    run(test)


# Silence


def test_client_that_is_gone_is_asked_and_then_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keepalive, "LOOK_S", 0.05)
    monkeypatch.setattr(FrameWriter, "progress", lambda _: 0)  # The kernel of one that is gone takes nothing.

    async def test() -> None:
        script = Script("a", HANG)
        async with serving(script) as server, connected(server) as client:
            client.post(COMPLETIONS, STREAMED)

            await client.until(lambda: [one for one in client.seen if one.kind == PING])
            await client.end()

            await script.cancelled.wait()

    run(test)


def test_client_that_answers_pings_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keepalive, "LOOK_S", 0.05)

    async def test() -> None:
        async with serving(Script("a", HANG)) as server, connected(server) as client:
            client.post(COMPLETIONS, STREAMED)

            for count in range(1, 5):
                while len([one for one in client.seen if one.kind == PING]) < count:
                    await client.read()
                client.send(frame(PING, ACK, 0, bytes(8)))

    run(test)


def test_client_that_reads_slowly_and_says_nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would answer the PING once it had read what is before it."""
    looks: list[int] = []
    look = Keepalive._look

    def count(self: Keepalive) -> None:
        looks.append(self._progress())
        look(self)

    monkeypatch.setattr(Keepalive, "_look", count)

    async def test() -> None:
        size = 16 << 20  # More than the kernels of both sides keep.
        config = HttpConfig(client=ClientBounds(stall_s_max=1e6, drain_s_max=1e6))
        async with serving(Script("x" * size), config=config) as server, connected(server) as client:
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            client.post(COMPLETIONS, COMPLETION)
            while not any(isinstance(one, H2Connection) and one._writer.is_full for one in server.clients._open):
                await asyncio.sleep(0.001)
            client.writer.transport.resume_reading()  # type: ignore[attr-defined]
            watched = connection_of(server)._keepalive
            while len(looks) < 3 * keepalive.SILENT_LOOKS_MAX:
                before = watched._progress()
                while watched._progress() == before:
                    assert await client.read(), "it counts as gone"
                watched._timer.cancel()
                watched._look()

            writer = connection_of(server)._writer
            assert writer.progress() < writer._written_size, "all of it has been read"
            assert not connection_of(server).transport.is_closing()

    run(test)


# Half-closed connections


@pytest.mark.parametrize("is_streamed", [True, False], ids=["streamed", "whole"])
def test_client_that_closes_its_side_has_disconnected(is_streamed: bool) -> None:
    """As over HTTP/1.1: nobody would tell a client that waits for its answers from one that is gone."""

    async def test() -> None:
        script = Script("a", HANG)
        async with serving(script) as server, connected(server) as client:
            client.post(COMPLETIONS, COMPLETION | {"stream": is_streamed})
            await script.running.wait()

            client.writer.write_eof()

            await script.cancelled.wait()
            assert await client.end() is None
            while server.clients._open:
                await asyncio.sleep(0.001)

    run(test)


def test_what_was_asked_before_a_client_closed_its_side_is_cancelled_with_its_body_incomplete() -> None:
    async def test() -> None:
        async with serving(Script("a")) as server, connected(server) as client:
            client.open(COMPLETIONS, ends=False)
            await client.until(lambda: client.seen)
            connection = connection_of(server)

            client.writer.write_eof()

            await client.end()
            while server.clients._open:
                await asyncio.sleep(0.001)
            assert (connection.heads_size, connection.bodies_size) == (0, 0)

    run(test)


# Flow control


async def stream_through(client: Client, step: int) -> Any:
    """The answer to a streamed completion, for which the client opens its window by `step` bytes at a time."""
    stream_id = client.post(COMPLETIONS, STREAMED)
    answer = client.answers[stream_id]
    while not answer.has_ended:
        client.send(window_update(stream_id, step))
        await client.read()
    return answer


def test_answer_passes_through_a_small_window_unchanged() -> None:
    async def test() -> None:
        parts = [f"{number} " * 100 for number in range(200)]
        async with serving(Script(*parts)) as server, connected(server, window=0) as client:
            answer = await stream_through(client, 5_000)

        assert texts(answer.body) == "".join(parts)
        assert answer.body.endswith(b"data: [DONE]\n\n")

    run(test)


def test_stream_that_is_not_read_holds_up_no_other() -> None:
    async def test() -> None:
        async with serving(Script("word " * 1000)) as server, connected(server, window=0) as client:
            blocked = client.post(COMPLETIONS, STREAMED)
            await client.until(lambda: client.answers[blocked].headers)
            other = client.post(COMPLETIONS, STREAMED)
            client.send(window_update(other, 1 << 20))

            answer = await client.answer(other)

        assert texts(answer.body) == "word " * 1000
        assert client.answers[blocked].body == b""

    run(test)


def test_window_of_a_setting_applies_to_open_streams() -> None:
    async def test() -> None:
        async with serving(Script("hello")) as server, connected(server, window=0) as client:
            stream_id = client.post(COMPLETIONS, STREAMED)
            await client.until(lambda: client.answers[stream_id].headers)

            client.send(settings(window=1 << 20))

            assert texts((await client.answer(stream_id)).body) == "hello"

    run(test)


def test_tokens_of_many_streams_leave_in_one_write() -> None:
    async def test() -> None:
        streams = 20
        ready, more = asyncio.Semaphore(0), asyncio.Event()

        async def pipeline(request: Any, call: Any, sink: Any) -> Any:
            ready.release()
            return await Script("first", more, "next", HANG)(request, call, sink)

        async with serving(pipeline) as server, connected(server) as client:
            ids = [client.post(COMPLETIONS, STREAMED) for _ in range(streams)]
            await client.until(
                lambda: all(b"first" in client.answers[one].body for one in ids if one in client.answers)
            )
            for _ in ids:
                await ready.acquire()
            await client.until(lambda: all(client.answers[one].body for one in ids))
            writes: list[bytes] = []
            writer = connection_of(server)._writer
            transport: Any = _Recording(writer.transport, writes)
            writer.transport = transport

            more.set()
            await client.until(lambda: all(b"next" in client.answers[one].body for one in ids))

        assert len(writes) == 1
        assert writes[0].count(b'"text":"next"') == streams

    run(test)


class _Recording:
    def __init__(self, transport: Any, writes: list[bytes]) -> None:
        self._transport = transport
        self._writes = writes

    def write(self, data: bytes) -> None:
        self._writes.append(data)
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
