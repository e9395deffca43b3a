"""Refused connections are answered when their request has come, and none stays longer than its bounds."""

import asyncio
import socket
from contextlib import suppress

import pytest

from services.http.server.accept import refuser as refuser_module
from services.http.server.accept.refuser import Refuser
from services.http.server.messages import HttpRequest, Response
from tests.support.doubles import run_async

ANSWER = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: one\r\nContent-Length: 4\r\n\r\n"
PROBE = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"
TEST_S_MAX = 10.0


class Refusal(Response):
    def encode(self, request: HttpRequest, *, is_last: bool) -> bytes:
        assert is_last
        return ANSWER


class Stage:
    """A refuser, and what it reports."""

    def __init__(self) -> None:
        self.refused: list[tuple[str, str | None]] = []
        self.probes: list[tuple[socket.socket, bytes]] = []
        self.clients: list[socket.socket] = []
        self.refuser = Refuser(self, on_probe=lambda *probe: self.probes.append(probe), on_room=lambda: None)

    def __enter__(self) -> "Stage":
        return self

    def __exit__(self, *_: object) -> None:
        self.refuser.close()
        for sock in (*self.clients, *(sock for sock, _ in self.probes)):
            sock.close()

    def no_room(self, request: HttpRequest) -> Response:
        self.refused.append((request.path, request.headers.get("x-request-id")))
        return Refusal(b"", status=503)

    def no_room_for_rpc(self) -> bytes | None:
        raise AssertionError("over HTTP/1.1")

    def connect(self, data: bytes = b"") -> socket.socket:
        """A client whose connection is refused, after it has sent `data`."""
        client, server = socket.socketpair()
        client.setblocking(False)
        client.sendall(data)
        self.refuser.refuse(server)
        self.clients.append(client)
        return client


async def read_all(client: socket.socket) -> bytes:
    """Read until the server has closed its direction."""
    data = b""
    async with asyncio.timeout(TEST_S_MAX):
        with suppress(ConnectionResetError):
            while piece := await asyncio.get_running_loop().sock_recv(client, 4096):
                data += piece
    return data


def test_request_that_has_come_is_answered_at_once() -> None:
    async def test() -> None:
        with Stage() as stage:
            client = stage.connect(HEAD + b"body")

            assert stage.refused == [("/v1/completions", "one")]
            assert await read_all(client) == ANSWER

    run_async(test())


def test_body_is_waited_for_because_some_clients_miss_an_early_answer() -> None:
    async def test() -> None:
        with Stage() as stage:
            client = stage.connect(HEAD)
            assert stage.refused == []

            client.sendall(b"body")

            assert await read_all(client) == ANSWER
            assert stage.refused == [("/v1/completions", "one")]

    run_async(test())


@pytest.mark.parametrize(
    "data",
    [
        HEAD.replace(b"Content-Length: 4", b"Content-Length: 4000000"),
        HEAD.replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n"),
        b"this is no request\r\n\r\n",
    ],
    ids=["large body", "waits for 100", "no request"],
)
def test_request_that_need_not_be_read_further_is_answered_at_once(data: bytes) -> None:
    async def test() -> None:
        with Stage() as stage:
            assert await read_all(stage.connect(data)) == ANSWER

    run_async(test())


@pytest.mark.parametrize("data", [b"", HEAD], ids=["silent", "half a request"])
def test_client_that_sends_nothing_more_is_answered_in_time(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refuser_module, "REFUSED_S_MAX", 0.02)

    async def test() -> None:
        with Stage() as stage:
            assert await read_all(stage.connect(data)) == ANSWER

    run_async(test())


def test_connection_is_closed_although_its_client_never_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refuser_module, "REFUSED_S_MAX", 0.02)

    async def test() -> None:
        with Stage() as stage:
            client = stage.connect(HEAD + b"body")
            async with asyncio.timeout(TEST_S_MAX):
                while True:
                    try:
                        client.send(b"more")
                    except (BrokenPipeError, ConnectionResetError):
                        break
                    await asyncio.sleep(0)

    run_async(test())


@pytest.mark.parametrize("first", [b"", b"GET /li", b"GET /live HTTP/1.1\r\nHost"])
def test_health_check_is_passed_on_once_it_has_come_whole(first: bytes) -> None:
    async def test() -> None:
        with Stage() as stage:
            client = stage.connect(first)
            assert stage.probes == []

            client.sendall(PROBE.removeprefix(first))
            async with asyncio.timeout(TEST_S_MAX):
                while not stage.probes:
                    await asyncio.sleep(0)

            assert stage.refused == []
            assert [request for _, request in stage.probes] == [PROBE]

    run_async(test())


def test_health_check_that_stays_incomplete_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: it was passed on, and kept a descriptor of the reserve for a minute."""
    monkeypatch.setattr(refuser_module, "REFUSED_S_MAX", 0.02)

    async def test() -> None:
        with Stage() as stage:
            assert await read_all(stage.connect(PROBE[:-2])) == ANSWER
            assert stage.probes == []

    run_async(test())


def test_number_of_refused_connections_is_bounded() -> None:
    async def test() -> None:
        with Stage() as stage:
            clients = [stage.connect(HEAD + b"body") for _ in range(3 * refuser_module.REFUSED_MAX)]

            assert len(stage.refused) == len(clients)
            assert not stage.refuser.is_full
            assert len(stage.refuser._timers) <= refuser_module.REFUSED_MAX
            assert [await read_all(client) for client in clients] == [ANSWER] * len(clients)

            waiting = [stage.connect() for _ in range(refuser_module.REFUSED_MAX // 2)]
            assert stage.refuser.is_full
            waiting[0].close()
            async with asyncio.timeout(TEST_S_MAX):
                while stage.refuser.is_full:
                    await asyncio.sleep(0)

    run_async(test())


def test_close_closes_all() -> None:
    async def test() -> None:
        with Stage() as stage:
            clients = [stage.connect(), stage.connect(HEAD), stage.connect(HEAD + b"body")]

            stage.refuser.close()

            assert [await read_all(client) for client in clients] == [b"", b"", ANSWER]

    run_async(test())
