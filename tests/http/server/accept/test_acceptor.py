"""Connections are accepted at once and set up in order, health checks first; `close` closes those not set up."""

import asyncio
import resource
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import pytest
from structlog.testing import capture_logs

from services.http.server.accept import acceptor as acceptor_module
from services.http.server.accept import refuser as refuser_module
from services.http.server.accept.acceptor import SETUPS_MAX
from services.http.server.config import HttpConfig
from services.http.server.context import BrokenHead
from services.http.server.exchange import Exchange
from services.http.server.listener import Listen, http_server
from services.http.server.messages import HttpRequest, Response
from services.runtime.loop import run_on_loop
from tests.registry.support import free_port
from tests.support.clock import WAIT_S
from tests.support.doubles import run_async

CLIENTS = 10 * SETUPS_MAX


class RecordingApp:
    """Records the paths of requests in order."""

    body_bytes_max = 0

    def __init__(self) -> None:
        self.served: list[str] = []
        self.refused: list[str] = []
        self.pauses = 0

    def on_head(self, request: HttpRequest) -> None:
        """Nothing is refused before its body has come."""

    async def answer(self, request: HttpRequest, exchange: Exchange) -> None:
        self.served.append(request.path)
        exchange.write(exchange.encode(Response(request.path.encode()), request))

    def refusal(self, broken: BrokenHead, headers: Mapping[str, str]) -> tuple[HttpRequest, Response]:
        raise AssertionError(broken)

    def closing(self, request: HttpRequest) -> Response:
        raise AssertionError(request.path)

    def no_room(self, request: HttpRequest) -> Response:
        self.refused.append(request.path)
        return Response(b"no room", status=503)

    def on_paused(self) -> None:
        self.pauses += 1

    @asynccontextmanager
    async def open(self, port: int = 0) -> AsyncIterator[int]:
        """Serve the application. Yields the port; 0 takes any free one."""
        async with http_server(self, HttpConfig(), Listen(f"127.0.0.1:{port}")) as server, asyncio.timeout(WAIT_S):
            yield server.port


def connect(port: int, path: str) -> socket.socket:
    """Connect and send a request. The kernel completes the connection before it is accepted."""
    sock = socket.create_connection(("127.0.0.1", port))
    sock.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    sock.setblocking(False)
    return sock


async def response_to(sock: socket.socket) -> bytes:
    with sock:
        return await asyncio.get_running_loop().sock_recv(sock, 4096)


def test_health_checks_are_served_before_a_crowd_that_came_earlier() -> None:
    async def test() -> None:
        app = RecordingApp()
        async with app.open() as port:
            socks = [connect(port, f"/{number}") for number in range(CLIENTS)]
            socks += [connect(port, path) for path in ("/live", "/health")]

            replies = [await response_to(sock) for sock in socks]

        assert all(text.startswith(b"HTTP/1.1 200") for text in replies)
        assert len(app.served) == len(socks)
        assert app.served.index("/live") <= 2 * SETUPS_MAX
        assert app.served.index("/health") <= 2 * SETUPS_MAX
        clients = [int(path[1:]) for path in app.served if path not in ("/live", "/health")]
        assert all(clients.index(number) < number + 2 * SETUPS_MAX for number in range(CLIENTS)), "out of order"

    run_async(test())


@pytest.mark.parametrize("turns", [2, 6], ids=["before it would be set up", "after that"])
def test_health_check_whose_first_byte_comes_late_overtakes_the_crowd(turns: int) -> None:
    """Bug: it was queued between its connect and its first byte, as one that is not a health check."""

    async def test() -> None:
        app = RecordingApp()
        async with app.open() as port:
            probe = socket.create_connection(("127.0.0.1", port))
            socks = [connect(port, f"/{number}") for number in range(CLIENTS)]
            for _ in range(turns):
                await asyncio.sleep(0)
            probe.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
            probe.setblocking(False)

            for sock in (probe, *socks):
                assert (await response_to(sock)).startswith(b"HTTP/1.1 200")

        assert app.served.index("/live") <= CLIENTS / 2

    run_async(test())


def test_connection_is_set_up_before_its_first_bytes_while_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor_module, "FIRST_BYTES_S", 2 * WAIT_S)

    async def test() -> None:
        async with http_server(RecordingApp(), HttpConfig(), Listen("127.0.0.1:0")) as server:
            with socket.create_connection(("127.0.0.1", server.port)):
                while not len(server.context.clients):
                    await asyncio.sleep(0)

    run_async(test())


def test_silent_and_disconnected_clients_do_not_delay_others() -> None:
    async def test() -> None:
        app = RecordingApp()
        async with app.open() as port:
            silent = socket.create_connection(("127.0.0.1", port))
            for number in range(SETUPS_MAX):
                connect(port, f"/gone-{number}").close()

            assert (await response_to(connect(port, "/after"))).startswith(b"HTTP/1.1 200")

            silent.sendall(b"GET /silent HTTP/1.1\r\nHost: x\r\n\r\n")
            silent.setblocking(False)
            assert (await response_to(silent)).startswith(b"HTTP/1.1 200")

    run_async(test())


def test_clients_wait_while_file_descriptors_have_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor_module, "PAUSE_S", 0.01)

    async def test() -> None:
        app = RecordingApp()
        async with app.open() as port:
            sock = connect(port, "/patient")
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (sock.fileno() + 1, hard))
            with capture_logs() as logs:
                try:
                    while not logs:
                        await asyncio.sleep(0)
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

            assert logs[0]["event"] == "no room for more clients"
            assert (await response_to(sock)).startswith(b"HTTP/1.1 200")

    run_async(test())


@contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """Limit this process to `count` more descriptors."""
    with socket.socket() as highest:
        first = highest.fileno()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first + count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_client_without_room_is_refused_with_a_response_and_health_checks_are_served() -> None:
    async def test() -> None:
        app = RecordingApp()
        async with app.open() as port:
            crowd = [connect(port, f"/{number}") for number in range(4)]
            probes = [connect(port, "/health") for _ in range(2)]
            with capture_logs() as logs, descriptors_left(2 * len(crowd)):  # All of them belong to the reserve.
                replies = [await response_to(sock) for sock in crowd]
                probed = [await response_to(sock) for sock in probes]

            assert all(text.startswith(b"HTTP/1.1 503") for text in replies)
            assert all(text.startswith(b"HTTP/1.1 200") and b"Connection: close" in text for text in probed)
            assert sorted(app.refused) == [f"/{number}" for number in range(4)]
            assert [line["event"] for line in logs] == ["no room for more clients"]
            assert (await response_to(connect(port, "/after"))).startswith(b"HTTP/1.1 200")

    run_async(test())


@pytest.mark.parametrize("run_loop", [asyncio.run, run_on_loop])
@pytest.mark.parametrize("rest", [b"", b"\r\n", b"\r\nGET /more"], ids=["incomplete", "complete", "too much"])
def test_health_checks_do_not_use_up_the_reserve(
    run_loop: Callable[[Any], None], rest: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: with 30 descriptors left, 40 incomplete health checks left a refused client without a byte."""
    monkeypatch.setattr(refuser_module, "REFUSED_S_MAX", 0.02)

    async def test() -> None:
        app = RecordingApp()
        async with app.open() as port:
            probes = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
            for probe in probes:
                probe.sendall(b"GET /health HTTP/1.1\r\n" + rest)
            client, check = connect(port, "/client"), connect(port, "/health")
            with capture_logs() as logs, descriptors_left(30):
                assert (await response_to(client)).startswith(b"HTTP/1.1 503")
                assert (await response_to(check)).startswith(b"HTTP/1.1 200")
            assert {line["event"] for line in logs} == {"no room for more clients"}
            for probe in probes:
                probe.close()

    run_loop(test())


def test_accepting_goes_on_as_soon_as_a_connection_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor_module, "PAUSE_S", 1000.0)

    async def test() -> None:
        app = RecordingApp()
        async with app.open() as port:
            first = connect(port, "/first")
            assert (await asyncio.get_running_loop().sock_recv(first, 4096)).startswith(b"HTTP/1.1 200")
            waiting = connect(port, "/waiting")
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (waiting.fileno() + 1, hard))
            try:
                while not app.pauses:
                    await asyncio.sleep(0)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            first.close()

            assert (await response_to(waiting)).startswith(b"HTTP/1.1 200")
            assert app.pauses == 1

    run_async(test())


@pytest.mark.parametrize("turns", range(8))
@pytest.mark.parametrize("run_loop", [asyncio.run, run_on_loop])
def test_close_closes_connections_that_are_not_set_up(run_loop: Callable[[Any], None], turns: int) -> None:
    """Bugs: a set-up that completed during `close` started one for a closed socket, which ended the server with an
    error; or it was cancelled without the connection's knowledge, which then answered."""

    async def test() -> None:
        app = RecordingApp()
        with capture_logs() as logs:
            async with app.open(free_port()) as port:
                socks = [connect(port, f"/{number}") for number in range(CLIENTS)]
                for _ in range(turns):
                    await asyncio.sleep(0)

        for sock in socks:
            with suppress(ConnectionResetError):
                await response_to(sock)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        assert logs == []

    run_loop(test())


def test_accepting_pauses_while_too_many_wait_to_be_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor_module, "WAITING_MAX", 4)
    monkeypatch.setattr(acceptor_module, "PAUSE_S", 0.01)

    async def test() -> None:
        app = RecordingApp()
        async with app.open() as port:
            socks = [connect(port, f"/{number}") for number in range(CLIENTS)]
            with capture_logs() as logs:
                for sock in socks:
                    assert (await response_to(sock)).startswith(b"HTTP/1.1 200")

        assert {(line["event"], line["why"]) for line in logs} == {
            ("no room for more clients", "4 connections wait to be set up")
        }

    run_async(test())


def test_close_forgets_silent_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: its timer ended after `close` and looked for it."""
    monkeypatch.setattr(acceptor_module, "FIRST_BYTES_S", 0.02)
    monkeypatch.setattr(acceptor_module, "SETUPS_MAX", 0)

    async def test() -> None:
        wrong: list[object] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: wrong.append(context))
        app = RecordingApp()
        async with app.open() as port:
            with socket.create_connection(("127.0.0.1", port)):
                for _ in range(5):
                    await asyncio.sleep(0)
        ended = asyncio.Event()
        loop.call_later(2 * acceptor_module.FIRST_BYTES_S, ended.set)
        await ended.wait()

        assert not wrong

    run_async(test())
