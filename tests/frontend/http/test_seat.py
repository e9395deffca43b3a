"""A seat: while an answer is streamed aiohttp keeps nothing of its request, and no request behind it gets lost."""

import asyncio
import gc
import json
import socket
from contextlib import suppress
from typing import Any

import pytest
from aiohttp import web

from services.frontend.http import HttpConfig, seat
from services.request import Call, Delta, Finish, FinishReason, Layer, Request, Sink
from tests.frontend.http.support import HANG, TEST_S_MAX, Script, raw_post, run, serving

UNARY = {"model": "org/tiny", "prompt": "hi"}
STREAMED = UNARY | {"stream": True}
COMPLETIONS = "/v1/completions"
LAST_CHUNK = b"0\r\n\r\n"


class Turns:
    """A pipeline that plays a script for each request, the last one again and again."""

    def __init__(self, *scripts: Layer) -> None:
        self.scripts = list(scripts)

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        return await script(request, call, sink)


async def whole_answer(reader: asyncio.StreamReader) -> bytes:
    """The text of a unary answer."""
    head = await reader.readuntil(b"\r\n\r\n")
    size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    text: str = json.loads(await reader.readexactly(size))["choices"][0]["text"]
    return text.encode()


_EARLIER: list[object] = []
"""Of tests before this one, which their failures may have kept."""


def handlers() -> list[object]:
    """What aiohttp keeps of clients."""
    kept = [one for one in gc.get_objects() if isinstance(one, web.RequestHandler | web.BaseRequest)]
    return [one for one in kept if not any(one is earlier for earlier in _EARLIER)]


async def taken_over() -> None:
    """Until the only stream is."""
    while handlers():
        gc.collect()
        await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream has lasted for a while at the next look."""
    monkeypatch.setattr(seat, "FRESH_S", 0.0)
    monkeypatch.setattr(seat, "LOOK_S", 0.001)
    _EARLIER.clear()
    _EARLIER.extend(handlers())


def test_of_a_stream_that_lasts_aiohttp_keeps_nothing() -> None:
    async def test() -> None:
        async with serving(Script("a", HANG)) as server:
            reader, writer = await server.connect()
            writer.write(raw_post(COMPLETIONS, STREAMED))
            await reader.readuntil(b'"text":"a"')

            await taken_over()

    run(test)


def test_a_short_stream_costs_no_new_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seat, "FRESH_S", 60.0)

    async def test() -> None:
        async with serving(Script("a")) as server:
            reader, writer = await server.connect()
            writer.write(raw_post(COMPLETIONS, UNARY))
            await whole_answer(reader)
            [before] = [one for one in handlers() if isinstance(one, web.RequestHandler)]
            writer.write(raw_post(COMPLETIONS, STREAMED))
            await reader.readuntil(LAST_CHUNK)
            await asyncio.sleep(0)

            assert [one for one in handlers() if isinstance(one, web.RequestHandler)] == [before]

    run(test)


@pytest.mark.parametrize("cuts", [(), (20,), (-3,), (20, -3)], ids=str)
def test_the_connection_takes_the_next_request_however_the_first_one_came(cuts: tuple[int, ...]) -> None:
    async def test() -> None:
        message, go = raw_post(COMPLETIONS, STREAMED), asyncio.Event()
        starts = [0, *(cut % len(message) for cut in cuts)]
        async with serving(Turns(Script("a", go, "b"), Script("c"))) as server:
            reader, writer = await server.connect()
            for start, end in zip(starts, [*starts[1:], len(message)], strict=True):
                writer.write(message[start:end])
                await asyncio.sleep(0.02)  # So that it comes as a piece of its own.
            await reader.readuntil(b'"text":"a"')
            if 20 not in cuts:  # A head in pieces stays with aiohttp.
                await taken_over()

            go.set()

            assert b'"text":"b"' in await reader.readuntil(LAST_CHUNK)
            writer.write(raw_post(COMPLETIONS, UNARY))
            assert await whole_answer(reader) == b"c"

    run(test)


def test_streams_and_other_answers_take_turns_on_a_connection() -> None:
    async def test() -> None:
        go = asyncio.Event()
        async with serving(Turns(Script("a"), Script("b", go), Script("a"), Script("b", go))) as server:
            reader, writer = await server.connect()
            for _ in range(2):
                writer.write(raw_post(COMPLETIONS, UNARY))
                assert await whole_answer(reader) == b"a"
                writer.write(raw_post(COMPLETIONS, STREAMED))
                await reader.readuntil(b'"text":"b"')
                await taken_over()
                go.set()
                await reader.readuntil(LAST_CHUNK)
                go.clear()

    run(test)


def test_a_request_that_comes_while_an_answer_is_streamed_is_answered_after_it() -> None:
    async def test() -> None:
        go = asyncio.Event()
        async with serving(Turns(Script("a", go, "b"), Script("c"))) as server:
            reader, writer = await server.connect()
            writer.write(raw_post(COMPLETIONS, STREAMED))
            await reader.readuntil(b'"text":"a"')
            await taken_over()
            writer.write(raw_post(COMPLETIONS, UNARY))
            await writer.drain()

            go.set()

            assert b'"text":"b"' in await reader.readuntil(LAST_CHUNK)
            assert await whole_answer(reader) == b"c"

    run(test)


@pytest.mark.parametrize("cut", [len(raw_post(COMPLETIONS, UNARY)), 8], ids=["a request", "a part of one"])
def test_what_aiohttp_has_read_behind_the_request_stays_with_it(cut: int) -> None:
    async def test() -> None:
        go, behind = asyncio.Event(), raw_post(COMPLETIONS, UNARY)
        async with serving(Turns(Script("a", go, "b"), Script("c"))) as server:
            reader, writer = await server.connect()
            writer.write(raw_post(COMPLETIONS, STREAMED) + behind[:cut])
            await reader.readuntil(b'"text":"a"')
            await asyncio.sleep(0.02)  # Some looks.
            assert handlers()

            writer.write(behind[cut:])
            go.set()

            assert b'"text":"b"' in await reader.readuntil(LAST_CHUNK)
            assert await whole_answer(reader) == b"c"

    run(test)


def test_so_does_what_comes_before_it_is_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seat, "FRESH_S", 0.1)

    async def test() -> None:
        go = asyncio.Event()
        async with serving(Turns(Script("a", go, "b"), Script("c"))) as server:
            reader, writer = await server.connect()
            writer.write(raw_post(COMPLETIONS, STREAMED))
            await reader.readuntil(b'"text":"a"')
            writer.write(raw_post(COMPLETIONS, UNARY))
            await asyncio.sleep(0.2)  # Some looks, and it is fresh no more.
            assert handlers()

            go.set()

            assert b'"text":"b"' in await reader.readuntil(LAST_CHUNK)
            assert await whole_answer(reader) == b"c"

    run(test)


def test_where_requests_came_too_early_nobody_but_aiohttp_knows_them_apart() -> None:
    """As long as two of them, what came behind a stream looked like its own body."""

    async def test() -> None:
        go = asyncio.Event()
        async with serving(Turns(Script("a"), Script("b", go), Script("c"))) as server:
            reader, writer = await server.connect()
            streamed = raw_post(COMPLETIONS, STREAMED)
            writer.write(raw_post(COMPLETIONS, UNARY) + streamed[:-1])
            assert await whole_answer(reader) == b"a"
            writer.write(streamed[-1:] + streamed)
            await reader.readuntil(b'"text":"b"')
            await asyncio.sleep(0.02)  # Some looks.

            go.set()

            await reader.readuntil(LAST_CHUNK)
            assert b'"text":"c"' in await reader.readuntil(LAST_CHUNK)

    run(test)


def test_what_comes_while_an_answer_is_streamed_is_read_no_further_than_the_bound() -> None:
    async def test() -> None:
        go = asyncio.Event()
        large: dict[str, Any] = UNARY | {"prompt": "x" * 300 * seat.AHEAD_BYTES_MAX}  # No kernel holds that much.
        async with serving(Turns(Script("a", go), Script("c"))) as server:
            reader, writer = await server.connect()
            writer.write(raw_post(COMPLETIONS, STREAMED))
            await reader.readuntil(b'"text":"a"')
            await taken_over()
            writer.write(raw_post(COMPLETIONS, large))
            size = -1
            while size != (size := writer.transport.get_write_buffer_size()):
                await asyncio.sleep(0.05)
            assert size > 0

            go.set()

            await reader.readuntil(LAST_CHUNK)
            assert await whole_answer(reader) == b"c"

    run(test)


def test_a_client_that_leaves_a_stream_that_was_taken_over_has_its_request_cancelled() -> None:
    async def test() -> None:
        pipeline = Script("a", HANG)
        async with serving(pipeline) as server:
            reader, writer = await server.connect()
            writer.write(raw_post(COMPLETIONS, STREAMED))
            await reader.readuntil(b'"text":"a"')
            await taken_over()

            writer.close()

            await pipeline.cancelled.wait()

    run(test)


@pytest.mark.parametrize("fresh_s", [0.0, 60.0], ids=["taken over", "fresh"])
@pytest.mark.parametrize("ends", [True, False], ids=["ends", "hangs"])
def test_when_the_server_closes_a_stream_may_end_in_time_and_is_then_cancelled(
    fresh_s: float, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seat, "FRESH_S", fresh_s)

    async def test() -> None:
        go = asyncio.Event()
        pipeline = Script("a", go)
        async with serving(pipeline, config=HttpConfig(shutdown_s_max=TEST_S_MAX if ends else 0.05)) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)  # It stays until the end.
            writer.write(raw_post(COMPLETIONS, STREAMED))
            await reader.readuntil(b'"text":"a"')
            if fresh_s == 0:
                await taken_over()
            if ends:
                asyncio.get_running_loop().call_later(0.05, go.set)
        writer.close()

        assert pipeline.cancelled.is_set() is not ends

    run(test)


def test_a_client_that_leaves_while_nothing_is_sent_has_its_request_cancelled() -> None:
    async def test() -> None:
        pipeline = Script(HANG)
        async with serving(pipeline) as server:
            _, writer = await server.connect()
            writer.write(raw_post(COMPLETIONS, STREAMED))
            await pipeline.running.wait()

            writer.close()

            await pipeline.cancelled.wait()

    run(test)


def test_a_stream_that_is_cancelled_as_the_server_closes_has_its_connection_closed() -> None:
    """One that was taken over stayed open: neither aiohttp nor anybody else knew of it."""

    async def test() -> None:
        async with serving(Script("a", HANG), config=HttpConfig(shutdown_s_max=0.05)) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)  # It stays until the end.
            writer.write(raw_post(COMPLETIONS, STREAMED))
            await reader.readuntil(b'"text":"a"')
            await taken_over()

        with suppress(ConnectionResetError):
            await reader.read()
        writer.close()

    run(test)


def test_a_stream_that_begins_as_the_server_closes_does_not_keep_it_from_closing() -> None:
    """It was cancelled by nobody."""

    async def test() -> None:
        late = Script("b", HANG)
        async with serving(Turns(Script("a", HANG), late), config=HttpConfig(shutdown_s_max=0.2)) as server:
            connections = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(2)]
            [(reader, writer), (other_reader, other_writer)] = connections
            other_writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
            await other_reader.readuntil(b"}")
            writer.write(raw_post(COMPLETIONS, STREAMED))
            await reader.readuntil(b'"text":"a"')
            asyncio.get_running_loop().call_later(0.05, other_writer.write, raw_post(COMPLETIONS, STREAMED))

        assert late.cancelled.is_set()
        for _, writer in connections:
            writer.close()

    run(test)


def test_a_bug_at_the_end_of_an_answer_harms_no_other_stream() -> None:
    """It ended the group of all streams."""

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


def test_a_client_that_asks_again_at_once_has_its_next_stream_taken_over_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What came before aiohttp had noticed the end of the stream looked like something behind its request."""
    monkeypatch.setattr(seat, "FRESH_S", 60.0)

    async def test() -> None:
        go = asyncio.Event()
        async with serving(Turns(Script("a", go), Script("b", HANG))) as server:
            with socket.create_connection(("127.0.0.1", server.port)) as client:
                client.setblocking(False)
                received = b""
                client.send(raw_post(COMPLETIONS, STREAMED))
                asyncio.get_running_loop().call_later(0.05, go.set)
                while not received.endswith(LAST_CHUNK):
                    await asyncio.sleep(0)  # A turn of the loop, and no more than one.
                    with suppress(BlockingIOError):
                        received += client.recv(1 << 16)
                monkeypatch.setattr(seat, "FRESH_S", 0.0)
                client.send(raw_post(COMPLETIONS, STREAMED))

                await taken_over()

    run(test)
