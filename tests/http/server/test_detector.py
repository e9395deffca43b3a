"""The first bytes of a connection say which version of HTTP it speaks, even if they come one by one."""

import asyncio

import pytest

from services.http.h2.wire.frames import PREFACE
from services.http.server.config import HttpConfig
from tests.http.h2.support import connected, settings
from tests.http.support import Script, all_read, run, serving


@pytest.mark.parametrize("count", [1, 3, len(PREFACE) - 1, len(PREFACE)])
def test_preface_may_come_in_pieces(count: int) -> None:
    async def test() -> None:
        async with serving(Script()) as server, connected(server, greets=False) as client:
            client.send(PREFACE[:count])
            await all_read(server, client.writer)
            client.send(PREFACE[count:], settings())

            assert (await client.answer(client.get("/live"))).status == 200

    run(test)


@pytest.mark.parametrize("first", [b"P", b"G", b"POST"])
def test_other_bytes_are_http_1(first: bytes) -> None:
    """POST begins as the preface does."""

    async def test() -> None:
        async with serving(Script()) as server:
            reader, writer = await server.connect()
            request = (b"POST" if first.startswith(b"P") else b"GET") + b" /live HTTP/1.1\r\nHost: x\r\n\r\n"
            writer.write(first)
            await all_read(server, writer)
            writer.write(request[len(first) :])

            assert (await reader.readline()).startswith(b"HTTP/1.1 ")

    run(test)


def test_bytes_that_are_nearly_the_preface_get_an_answer() -> None:
    async def test() -> None:
        async with serving(Script()) as server:
            reader, writer = await server.connect()
            writer.write(b"PRI * HTTP/2.0\r\n\r\nnothing\r\n")

            assert (await reader.readline()).startswith(b"HTTP/1.1 ")

    run(test)


def test_connection_that_says_nothing_is_idle() -> None:
    async def test() -> None:
        async with serving(Script(), config=HttpConfig(keepalive_s=0.05)) as server:
            reader, writer = await server.connect()
            writer.write(PREFACE[:5])

            assert await reader.read() == b""

    run(test)


@pytest.mark.parametrize("is_http_2", [False, True])
def test_connection_counts_as_ended_once_and_not_before_its_end(is_http_2: bool) -> None:
    """Bug: an acceptor that waited for a connection to end was woken by the first bytes of another one."""

    async def test() -> None:
        async with serving(Script()) as server:
            ended: list[None] = []
            server.clients.on_removed = lambda: ended.append(None)
            if is_http_2:
                async with connected(server) as client:
                    await client.answer(client.get("/live"))
                    assert ended == []
            else:
                reader, writer = await server.connect()
                writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
                await reader.readline()
                assert ended == []
                writer.close()
            while not ended:
                await asyncio.sleep(0.001)
            assert (len(ended), len(server.clients)) == (1, 0)

    run(test)
