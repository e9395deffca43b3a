"""The end of a response is sent whole, or its client is disconnected, within a time that depends on its size."""

import asyncio
import json
from typing import Any

import pytest
from structlog.testing import capture_logs

from services.core.call import Call
from services.core.flow.client_flow import ClientBounds
from services.core.interface import Finish
from services.core.request import Request
from services.http.server.config import HttpConfig
from tests.frontend.api.openai.sse.test_backlog import TEXT, DeliversAhead, is_cut, post, wait_for
from tests.http.support import Script, bytes_left, deaf_client, raw_post, run, serving
from tests.support.clock import WAIT_S

COMPLETION = {"model": "org/tiny", "prompt": "hi"}
COMPLETIONS = "/v1/completions"


@pytest.mark.parametrize(("size", "seconds"), [(0, 10.0), (1000, 10.0), (1500, 15.0), (100_000, 1000.0)])
def test_drain_time_is_proportional_to_the_size_above_the_buffer_bound(size: int, seconds: float) -> None:
    assert ClientBounds(buffer_bytes_max=1000, drain_s_max=10.0).drain_s(size) == seconds


def config(**bounds: Any) -> HttpConfig:
    return HttpConfig(client=ClientBounds(**bounds))


def test_client_that_reads_a_large_body_slowly_gets_all_of_it() -> None:
    text = "x" * 20_000_000

    async def test() -> None:
        # At 50 kB in 0.2 s, the whole body may take 80 s.
        bounds = config(buffer_bytes_max=50_000, drain_s_max=0.2, stall_s_max=WAIT_S)
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
        assert loop.time() - began > 0.4, "the client was not slow"

    run(test)


def test_client_that_reads_nothing_is_disconnected_before_the_drain_time_is_over() -> None:
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
def test_last_write_that_waits_for_the_cork_is_bounded_as_well(is_held_longer: bool) -> None:
    """It waits one iteration of the event loop for the cork. If the cork is held for longer, it is written alone."""

    async def test() -> None:
        async def with_others(request: Request, call: Call, sink: Any) -> Finish:
            cork = server.context.cork

            def release() -> None:
                waited.append(bool(cork._writes))
                cork.release()

            cork.hold()
            if not is_held_longer:
                asyncio.get_running_loop().call_soon(release)
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
def test_client_that_leaves_the_end_of_a_stream_unread_is_disconnected(bounds: dict[str, float]) -> None:
    """Bug: data that fitted the transport's buffer was not watched, and the connection stayed open for ever."""

    async def test() -> None:
        pipeline = DeliversAhead()
        pipeline.go.set()
        async with serving(pipeline, config=config(buffer_bytes_max=2**30, **bounds)) as server:
            with deaf_client(server, post()) as client:
                while not logs:
                    await wait_for(0.01)
                assert await is_cut(client)

    with capture_logs() as logs:
        run(test)
    assert [entry["reason"] for entry in logs] == ["SLOW_CLIENT"]


class FillsKernelBuffer(DeliversAhead):
    """Delivers until the kernel's buffer is full, and ends. The unsent rest is too small to make the client slow."""

    async def __call__(self, request: Request, call: Call, sink: Any) -> Finish:
        while not sink._exchange.unsent_size():
            self._say(sink, TEXT * 50)
            await asyncio.sleep(0)
        return self._finish(sink)


@pytest.mark.parametrize("bounds", [{"drain_s_max": 0.1}, {"stall_s_max": 0.1}], ids=["in time", "at all"])
def test_client_that_was_never_slow_is_disconnected_if_it_leaves_the_end_unread(bounds: dict[str, float]) -> None:
    """The rest fits the transport's buffer, and is watched nevertheless."""

    async def test() -> None:
        async with serving(FillsKernelBuffer(), config=config(**bounds)) as server:
            with deaf_client(server, post()) as client:
                while not logs:
                    await wait_for(0.01)
                assert await is_cut(client)

    with capture_logs() as logs:
        run(test)
    assert [entry["reason"] for entry in logs] == ["SLOW_CLIENT"]


def test_waiting_for_the_last_byte_leaves_the_connection_usable() -> None:
    """Waiting for the last byte changes a limit of the transport, which outlives the answer."""

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
