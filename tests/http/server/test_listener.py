"""The server starts on a free port or says why it cannot, survives garbage, and ends in bounded time."""

import asyncio

import pytest

from services.frontend.api.build import build_app
from services.http.app import HttpApp
from services.http.server.config import HttpConfig
from services.http.server.listener import Listen, http_server
from services.runtime.listen import bare_host, split_listen
from services.runtime.process import StartupError
from tests.frontend.support import alone, finder_of
from tests.http.support import HANG, Script, StubFrontend, error_of, raw_post, run, serving
from tests.registry.support import free_port


def new_app() -> HttpApp:
    return build_app(Script(), StubFrontend(), alone(), HttpConfig(), lambda *_: None, finder_of())


def test_port_in_use_is_a_startup_error() -> None:
    async def test() -> None:
        async with serving(Script()) as server:
            app = new_app()
            with pytest.raises(StartupError, match=f"HTTP on 127.0.0.1:{server.port}: the port is in use; stop"):
                async with http_server(app, HttpConfig(), Listen(f"127.0.0.1:{server.port}")):
                    pass

    run(test)


def test_server_answers_at_each_of_its_addresses_and_counts_all_connections_together() -> None:
    async def test() -> None:
        async with http_server(new_app(), HttpConfig(), Listen("127.0.0.1:0"), Listen("[::1]:0")) as server:
            writers = []
            for address in server.addresses:
                host, port = split_listen(address)
                reader, writer = await asyncio.open_connection(bare_host(host), port)
                writers.append(writer)
                writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
                assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            assert len(server.context.clients) == len(server.addresses)
            for writer in writers:
                writer.close()

    run(test)


def test_address_that_is_taken_is_named_with_its_option_and_the_others_are_free_again() -> None:
    async def test() -> None:
        app, free = new_app(), f"127.0.0.1:{free_port()}"
        async with serving(Script()) as server:
            taken = Listen(f"127.0.0.1:{server.port}", "gRPC", "--grpc-listen")
            with pytest.raises(StartupError, match=r"cannot listen for gRPC on .*, or give another --grpc-listen$"):
                async with http_server(app, HttpConfig(), Listen(free), taken):
                    pass
            async with http_server(app, HttpConfig(), Listen(free)) as another:
                assert another.addresses == [free]

    run(test)


def test_ipv6_address_is_given_in_brackets() -> None:
    async def test() -> None:
        app = new_app()
        async with http_server(app, HttpConfig(), Listen("[::1]:0")) as server:
            _, writer = await asyncio.open_connection("::1", server.port)
            writer.close()

    run(test)


def test_address_of_another_machine_is_a_startup_error() -> None:
    async def test() -> None:
        app = new_app()
        with pytest.raises(StartupError, match=r"cannot listen for HTTP on 192\.0\.2\.1:0"):
            async with http_server(app, HttpConfig(), Listen("192.0.2.1:0")):
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
