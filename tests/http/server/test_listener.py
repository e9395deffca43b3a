"""The server: it starts on a free port or says why not, takes no harm from garbage, and ends in bounded time."""

import asyncio

import pytest

from services.frontend.api.build import build_app
from services.http.app import HttpApp
from services.http.server.config import HttpConfig
from services.http.server.listener import http_server
from services.runtime.process import StartupError
from tests.frontend.support import alone
from tests.http.support import HANG, Script, Shelf, error_of, raw_post, run, serving


def app_of_nothing() -> HttpApp:
    return build_app(Script(), Shelf(), alone(), HttpConfig(), lambda *_: None)


def test_a_port_in_use_is_one_sentence() -> None:
    async def test() -> None:
        async with serving(Script()) as server:
            app = app_of_nothing()
            with pytest.raises(StartupError, match=f"HTTP on 127.0.0.1:{server.port}: the port is in use; stop"):
                async with http_server(app, HttpConfig(), "127.0.0.1", server.port):
                    pass

    run(test)


def test_an_ipv6_address_is_given_in_brackets() -> None:
    async def test() -> None:
        app = app_of_nothing()
        async with http_server(app, HttpConfig(), "[::1]", 0) as server:
            _, writer = await asyncio.open_connection("::1", server.port)
            writer.close()

    run(test)


def test_an_address_that_is_not_here_is_one_sentence() -> None:
    async def test() -> None:
        app = app_of_nothing()
        with pytest.raises(StartupError, match=r"cannot listen for HTTP on 192\.0\.2\.1:0"):
            async with http_server(app, HttpConfig(), "192.0.2.1", 0):
                pass

    run(test)


@pytest.mark.parametrize(
    ("garbage", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\xff" * 100, 400),
        (b"GET\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"x" * 100_000 + b"\r\n\r\n", 431),
    ],
)
def test_what_is_not_http_is_refused_and_is_no_error_of_ours(
    garbage: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with serving(Script("ok")) as server:
            reader, writer = await server.connect()
            writer.write(garbage)
            assert (await reader.readline()).startswith(b"HTTP/1.1 %d " % status)
            _, _, body = (await reader.read()).partition(b"\r\n\r\n")
            assert error_of(body)["code"] == "INVALID_ARGUMENT"
            assert (await server.get("/live"))[0].status == 200

    run(test)
    assert not caplog.records


def test_closing_cancels_what_still_runs() -> None:
    async def test() -> None:
        script = Script("a", HANG)
        async with serving(script, config=HttpConfig(shutdown_s_max=0.02)) as server:
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(raw_post("/v1/completions", {"model": "org/tiny", "prompt": "hi", "stream": True}))
            await script.running.wait()
        assert script.cancelled.is_set()
        writer.close()

    run(test)
