"""The server starts on a free port or says why it cannot, survives garbage, and ends in bounded time."""

import asyncio

import pytest

from services.frontend.api.build import build_app
from services.http.app import HttpApp
from services.http.server.config import HttpConfig
from services.http.server.listener import http_server
from services.runtime.process import StartupError
from tests.frontend.support import alone, finder_of
from tests.http.support import HANG, Script, StubFrontend, error_of, raw_post, run, serving


def new_app() -> HttpApp:
    return build_app(Script(), StubFrontend(), alone(), HttpConfig(), lambda *_: None, finder_of())


def test_port_in_use_is_a_startup_error() -> None:
    async def test() -> None:
        async with serving(Script()) as server:
            app = new_app()
            with pytest.raises(StartupError, match=f"HTTP on 127.0.0.1:{server.port}: the port is in use; stop"):
                async with http_server(app, HttpConfig(), "127.0.0.1", server.port):
                    pass

    run(test)


def test_ipv6_address_is_given_in_brackets() -> None:
    async def test() -> None:
        app = new_app()
        async with http_server(app, HttpConfig(), "[::1]", 0) as server:
            _, writer = await asyncio.open_connection("::1", server.port)
            writer.close()

    run(test)


def test_address_of_another_machine_is_a_startup_error() -> None:
    async def test() -> None:
        app = new_app()
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
def test_bytes_that_are_not_http_are_refused_without_an_error_in_the_log(
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


def test_closing_the_server_cancels_running_answers() -> None:
    async def test() -> None:
        script = Script("a", HANG)
        async with serving(script, config=HttpConfig(shutdown_s_max=0.02)) as server:
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(raw_post("/v1/completions", {"model": "org/tiny", "prompt": "hi", "stream": True}))
            await script.running.wait()
        assert script.cancelled.is_set()
        writer.close()

    run(test)
