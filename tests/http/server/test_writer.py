"""Sending: the end of an answer is sent whole, or its client is cut, in a time that fits its size."""

import asyncio
import json
from typing import Any

import pytest
from structlog.testing import capture_logs

from services.core.call import Call
from services.core.client_flow import ClientBounds
from services.core.interface import Finish
from services.core.request import Request
from services.http.server.config import HttpConfig
from services.http.server.writer import drain_s
from tests.frontend.api.openai.test_sse_backlog import TEXT, Ahead, is_cut, post, wait_for
from tests.http.support import TEST_S_MAX, Script, bytes_left, deaf_client, raw_post, run, serving

COMPLETION = {"model": "org/tiny", "prompt": "hi"}
COMPLETIONS = "/v1/completions"


@pytest.mark.parametrize(("size", "seconds"), [(0, 10.0), (1000, 10.0), (1500, 15.0), (100_000, 1000.0)])
def test_a_body_has_time_in_proportion_to_its_size_but_what_a_stream_may_leave_unread_has_it_all(
    size: int, seconds: float
) -> None:
    assert drain_s(ClientBounds(buffer_bytes_max=1000, drain_s_max=10.0), size) == seconds


def config(**bounds: Any) -> HttpConfig:
    return HttpConfig(client=ClientBounds(**bounds))


def test_a_client_that_reads_a_large_body_slowly_but_steadily_gets_it() -> None:
    text = "x" * 20_000_000

    async def test() -> None:
        # At the pace of 50 kB in 0.2 s it may take 80 s for all.
        bounds = config(buffer_bytes_max=50_000, drain_s_max=0.2, stall_s_max=TEST_S_MAX)
        async with serving(Script(text), config=bounds) as server:
            reader, writer = await server.connect()
            writer.write(raw_post(COMPLETIONS, COMPLETION))
            loop, body = asyncio.get_running_loop(), bytearray()
            head = await reader.readuntil(b"\r\n\r\n")
            began = loop.time()
            while len(body) < len(text) and (data := await reader.read(1 << 18)):
                body += data
                await wait_for(0.01)

        assert b"200 OK" in head
        assert json.loads(body)["choices"][0]["text"] == text
        assert loop.time() - began > 0.4, "else it was not slow"

    run(test)


def test_a_client_that_takes_nothing_of_a_body_is_cut_however_much_time_its_size_gives() -> None:
    async def test() -> None:
        script = Script("x" * 20_000_000)
        bounds = config(buffer_bytes_max=100_000, drain_s_max=30.0, stall_s_max=0.1)
        async with serving(script, config=bounds) as server:
            with deaf_client(server, raw_post(COMPLETIONS, COMPLETION)) as client:
                while not logs:
                    await wait_for(0.01)
                assert await bytes_left(client) < 15_000_000

    with capture_logs() as logs:
        run(test)
    assert [entry["reason"] for entry in logs] == ["SLOW_CLIENT"]


@pytest.mark.parametrize("is_held_longer", [False, True])
def test_a_last_write_that_leaves_with_others_is_bounded_as_any(is_held_longer: bool) -> None:
    """It waits for them a turn of the loop: held for longer, it leaves by itself."""

    async def test() -> None:
        async def with_others(request: Request, call: Call, sink: Any) -> Finish:
            cork = server.clients.cork

            def pull() -> None:
                waited.append(bool(cork._writes))
                cork.pull()

            cork.put_in()
            if not is_held_longer:
                asyncio.get_running_loop().call_soon(pull)
            return await Script("x" * 20_000_000)(request, call, sink)

        bounds = config(buffer_bytes_max=100_000, drain_s_max=30.0, stall_s_max=0.1)
        async with serving(with_others, config=bounds) as server:
            with deaf_client(server, raw_post(COMPLETIONS, COMPLETION)) as client:
                while not logs:
                    await wait_for(0.01)
                assert await bytes_left(client) < 15_000_000

    waited: list[bool] = []
    with capture_logs() as logs:
        run(test)
    assert [entry["reason"] for entry in logs] == ["SLOW_CLIENT"]
    assert waited == ([] if is_held_longer else [True])


@pytest.mark.parametrize("bounds", [{"drain_s_max": 0.1}, {"stall_s_max": 0.1}], ids=["in time", "at all"])
def test_a_client_that_leaves_a_little_of_the_end_is_cut_as_well(bounds: dict[str, float]) -> None:
    """Once what fits the transport's buffer was nobody's any more, and its connection stayed for ever."""

    async def test() -> None:
        pipeline = Ahead()
        pipeline.go.set()
        async with serving(pipeline, config=config(buffer_bytes_max=2**30, **bounds)) as server:
            with deaf_client(server, post()) as client:
                while not logs:
                    await wait_for(0.01)
                assert await is_cut(client)

    with capture_logs() as logs:
        run(test)
    assert [entry["reason"] for entry in logs] == ["SLOW_CLIENT"]


class Brimming(Ahead):
    """It delivers until the kernel takes no more, and ends: what is unsent then is less than makes a client behind."""

    async def __call__(self, request: Request, call: Call, sink: Any) -> Finish:
        while not sink._transport.get_write_buffer_size():
            self._say(sink, TEXT * 50)
            await asyncio.sleep(0)
        return self._finish(sink)


@pytest.mark.parametrize("bounds", [{"drain_s_max": 0.1}, {"stall_s_max": 0.1}], ids=["in time", "at all"])
def test_so_is_one_that_was_never_behind(bounds: dict[str, float]) -> None:
    """What it leaves fits the transport's buffer, and is watched all the same."""

    async def test() -> None:
        async with serving(Brimming(), config=config(**bounds)) as server:
            with deaf_client(server, post()) as client:
                while not logs:
                    await wait_for(0.01)
                assert await is_cut(client)

    with capture_logs() as logs:
        run(test)
    assert [entry["reason"] for entry in logs] == ["SLOW_CLIENT"]


def test_the_next_request_finds_the_connection_as_it_was() -> None:
    """The wait for the last byte is a setting of the connection, which outlives the answer."""

    async def test() -> None:
        text = "x" * 6_000_000
        async with serving(Script(text), config=config(buffer_bytes_max=2**30)) as server:
            reader, writer = await server.connect()
            for _ in range(3):
                writer.write(raw_post(COMPLETIONS, COMPLETION))
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                body = await reader.readexactly(size)
                assert json.loads(body)["choices"][0]["text"] == text

    run(test)
