"""The door: whoever knocks is let in and served, probes first, and nobody is left standing when it closes."""

import asyncio
import resource
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from structlog.testing import capture_logs

from services.http.server import acceptor as acceptor_module
from services.http.server.acceptor import SEATS_MAX
from services.http.server.config import HttpConfig
from services.http.server.connection import Connection
from services.http.server.listener import http_server
from services.http.server.messages import HttpRequest, Response
from services.http.server.parser import BrokenHead
from services.runtime.loop import run_on_loop
from tests.registry.support import free_port
from tests.support.doubles import run_async

TEST_S_MAX = 10.0
CLIENTS = 10 * SEATS_MAX


class House:
    """A server that notes who came."""

    body_bytes_max = 0

    def __init__(self) -> None:
        self.served: list[str] = []

    def is_probe(self, request: HttpRequest) -> bool:
        return request.path in ("/live", "/health")

    async def answer(self, request: HttpRequest, connection: Connection) -> None:
        self.served.append(request.path)
        connection.transport.write(Response(request.path.encode()).encode(request, is_last=False))

    def refusal(self, broken: BrokenHead, headers: Mapping[str, str]) -> bytes:
        raise AssertionError(broken)

    @asynccontextmanager
    async def open(self, port: int = 0) -> AsyncIterator[int]:
        """The port: any unless one is given."""
        async with http_server(self, HttpConfig(), "127.0.0.1", port) as server, asyncio.timeout(TEST_S_MAX):
            yield server.port


def knock(port: int, path: str) -> socket.socket:
    """Come and ask; the kernel lets one come though nobody looks yet."""
    sock = socket.create_connection(("127.0.0.1", port))
    sock.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    sock.setblocking(False)
    return sock


async def reply(sock: socket.socket) -> bytes:
    with sock:
        return await asyncio.get_running_loop().sock_recv(sock, 4096)


def test_a_crowd_is_served_and_a_probe_before_those_who_came_before_it() -> None:
    async def test() -> None:
        house = House()
        async with house.open() as port:
            socks = [knock(port, f"/{number}") for number in range(CLIENTS)]
            socks += [knock(port, path) for path in ("/live", "/health")]

            replies = [await reply(sock) for sock in socks]

        assert all(text.startswith(b"HTTP/1.1 200") for text in replies)
        assert len(house.served) == len(socks)
        assert house.served.index("/live") <= 2 * SEATS_MAX
        assert house.served.index("/health") <= 2 * SEATS_MAX
        clients = [int(path[1:]) for path in house.served if path not in ("/live", "/health")]
        assert all(clients.index(number) < number + 2 * SEATS_MAX for number in range(CLIENTS)), "in turn"

    run_async(test())


@pytest.mark.parametrize("turns", [2, 6], ids=["before it has a seat", "after that"])
def test_a_probe_that_speaks_a_little_late_does_not_stand_behind_those_who_came(turns: int) -> None:
    """It was let in between its connect and its first word."""

    async def test() -> None:
        house = House()
        async with house.open() as port:
            probe = socket.create_connection(("127.0.0.1", port))
            socks = [knock(port, f"/{number}") for number in range(CLIENTS)]
            for _ in range(turns):
                await asyncio.sleep(0)
            probe.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
            probe.setblocking(False)

            for sock in (probe, *socks):
                assert (await reply(sock)).startswith(b"HTTP/1.1 200")

        assert house.served.index("/live") <= CLIENTS / 2

    run_async(test())


def test_a_client_that_is_silent_or_gone_holds_up_nobody() -> None:
    async def test() -> None:
        house = House()
        async with house.open() as port:
            silent = socket.create_connection(("127.0.0.1", port))
            for number in range(SEATS_MAX):
                knock(port, f"/gone-{number}").close()

            assert (await reply(knock(port, "/after"))).startswith(b"HTTP/1.1 200")

            silent.sendall(b"GET /silent HTTP/1.1\r\nHost: x\r\n\r\n")
            silent.setblocking(False)
            assert (await reply(silent)).startswith(b"HTTP/1.1 200")

    run_async(test())


def test_without_files_clients_wait_until_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor_module, "FULL_S", 0.01)

    async def test() -> None:
        house = House()
        async with house.open() as port:
            sock = knock(port, "/patient")
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (sock.fileno() + 1, hard))
            with capture_logs() as logs:
                try:
                    while not logs:
                        await asyncio.sleep(0)
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

            assert logs[0]["event"] == "no room for more clients"
            assert (await reply(sock)).startswith(b"HTTP/1.1 200")

    run_async(test())


@pytest.mark.parametrize("turns", range(8))
@pytest.mark.parametrize("run_loop", [asyncio.run, run_on_loop])
def test_who_still_waits_when_it_closes_is_sent_away(run_loop: Callable[[Any], None], turns: int) -> None:
    """Whoever was seated just then had the next seated, who had been sent away: that ended the server with an error. Or
    the seat was taken away again, of which the connection heard nothing: it answered, and that was a bug."""

    async def test() -> None:
        house = House()
        with capture_logs() as logs:
            async with house.open(free_port()) as port:
                socks = [knock(port, f"/{number}") for number in range(CLIENTS)]
                for _ in range(turns):
                    await asyncio.sleep(0)

        for sock in socks:
            with suppress(ConnectionResetError):
                await reply(sock)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        assert logs == []

    run_loop(test())


def test_when_too_many_have_no_seat_the_others_wait_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor_module, "STANDING_MAX", 4)
    monkeypatch.setattr(acceptor_module, "FULL_S", 0.01)

    async def test() -> None:
        house = House()
        async with house.open() as port:
            socks = [knock(port, f"/{number}") for number in range(CLIENTS)]
            with capture_logs() as logs:
                for sock in socks:
                    assert (await reply(sock)).startswith(b"HTTP/1.1 200")

        assert {(line["event"], line["why"]) for line in logs} == {("no room for more clients", "4 have no seat yet")}

    run_async(test())


def test_a_silent_client_is_forgotten_when_it_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time ended later, and then it was looked for."""
    monkeypatch.setattr(acceptor_module, "SILENT_S", 0.02)

    async def test() -> None:
        wrong: list[object] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: wrong.append(context))
        house = House()
        async with house.open() as port:
            with socket.create_connection(("127.0.0.1", port)):
                for _ in range(5):
                    await asyncio.sleep(0)
        ended = asyncio.Event()
        loop.call_later(2 * acceptor_module.SILENT_S, ended.set)
        await ended.wait()

        assert not wrong

    run_async(test())
