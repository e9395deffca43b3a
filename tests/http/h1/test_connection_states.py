"""A connection changes its state as the table in its docstring says, and in no other way."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from services.core.errors import Failure, Reason
from services.http.h1.connection import Connection
from services.http.server import clients
from services.http.server.config import HttpConfig
from services.http.server.context import BrokenHead, ConnectionContext
from services.http.server.exchange import Exchange
from services.http.server.listener import HttpServer, Listen, http_server
from services.http.server.messages import HttpRequest, Response
from tests.support.clock import WAIT_S
from tests.support.doubles import run_async
from tests.support.tables import rows_of

SHORT_S = 0.2
"""The time of a bound that passes during a test."""
AT_ONCE = b"GET /at-once HTTP/1.1\r\nHost: x\r\n\r\n"
HELD = b"POST /held HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello"
LAST = HELD.replace(b"Host: x", b"Connection: close")
IN_HEAD, IN_BODY = HELD[:9], HELD[:-2]
REFUSED = HELD.replace(b"Host: x", b"X-Refused: 1")
NO_REQUEST = b"no HTTP\r\n\r\n"
INTO = {"idle": b"", "reading": IN_HEAD, "answering": HELD, "lingering": NO_REQUEST}
"""State → what brings an idle connection into it."""


@dataclass
class HoldingApp:
    """Answers each request to /held once `release` is called for it."""

    body_bytes_max = 1000
    running: int = 0
    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))

    def release(self) -> None:
        self.turns.release()

    def on_head(self, request: HttpRequest) -> None:
        if "x-refused" in request.headers:
            request.refusal = Failure(Reason.UNAUTHENTICATED, "who are you?")

    async def answer(self, request: HttpRequest, exchange: Exchange) -> None:
        if request.path == "/held":
            self.running += 1
            await self.turns.acquire()
        exchange.write(exchange.encode(Response(b""), request))

    def refusal(self, broken: BrokenHead, headers: Mapping[str, str]) -> tuple[HttpRequest, Response]:
        return HttpRequest(method="", path="", headers=headers), Response(b"", status=400)

    def no_room(self, request: HttpRequest) -> Response:
        raise AssertionError(request.path)

    def closing(self, request: HttpRequest) -> Response:
        return Response(b"", status=503)

    def on_paused(self) -> None:
        raise AssertionError("descriptors have run out")


@dataclass
class Stage:
    """A connection, its client and its application."""

    app: HoldingApp
    writer: asyncio.StreamWriter
    connection: Connection
    context: ConnectionContext
    advance: Callable[[float], None]

    async def reach(self, state: str) -> None:
        while self.connection.state != state:
            await asyncio.sleep(0.001)

    async def send(self, data: bytes) -> None:
        """Send, and wait until the server has read it."""
        self.writer.write(data)
        await asyncio.sleep(0.02)


async def close_before_its_turn(stage: Stage) -> None:
    stage.context.start_limiter._left = 0  # Nothing starts any more.
    stage.app.release()
    await stage.reach("idle")
    await stage.send(HELD)
    await stage.context.clients.close(0)


Play = Callable[[Stage], Awaitable[None]]


@dataclass(frozen=True)
class Event:
    """What happens to a connection. `into`: what brings it into the state before. `config`: bounds that pass."""

    play: Play
    into: bytes | None = None
    config: Mapping[str, float] = field(default_factory=dict)


def sends(data: bytes) -> Event:
    return Event(lambda stage: stage.send(data))


def passes(bound: str, *, into: bytes | None = None) -> Event:
    async def wait(stage: Stage) -> None:
        """The event loop lets it pass."""

    return Event(wait, into, {bound: SHORT_S})


async def pass_keepalive(stage: Stage) -> None:
    stage.advance(HttpConfig().keepalive_s)


async def disconnect(stage: Stage) -> None:
    stage.writer.transport.abort()


def finishes(*, behind: bytes = b"", into: bytes = HELD) -> Event:
    """The answer is sent. `behind`: what came while it ran."""

    async def finish(stage: Stage) -> None:
        await stage.send(behind)
        stage.app.release()
        if behind == HELD:
            while stage.app.running < 2:
                await asyncio.sleep(0.001)

    return Event(finish, into)


EVENTS: Mapping[tuple[str, str], Event] = {
    ("idle", "a request arrives"): sends(HELD),
    ("idle", "a part of a request arrives"): sends(IN_HEAD),
    ("idle", "bytes arrive that are not a request"): sends(NO_REQUEST),
    ("idle", "`keepalive_s` passes"): Event(pass_keepalive),
    ("reading", "the rest arrives"): sends(HELD[len(IN_HEAD) :]),
    ("reading", "the head is complete and refused, the body is not complete"): Event(
        lambda stage: stage.send(REFUSED[len(IN_HEAD) : -2]), into=REFUSED[: len(IN_HEAD)]
    ),
    ("reading", "bytes arrive that are not a request"): sends(b"\0\r\n\r\n"),
    ("reading", "`body_read_s_max` passes, the head is incomplete"): passes("body_read_s_max"),
    ("reading", "`body_read_s_max` passes, the body is incomplete"): passes("body_read_s_max", into=IN_BODY),
    ("answering", "the answer is sent"): finishes(),
    ("answering", "the answer is sent, the next request is buffered"): finishes(behind=HELD),
    ("answering", "the answer is sent, a part of the next request is buffered"): finishes(behind=IN_BODY),
    ("answering", "the last answer is sent"): finishes(into=LAST),
    ("answering", "the last answer is sent, more bytes are buffered"): finishes(into=LAST, behind=AT_ONCE),
    ("answering", "the client disconnects"): Event(disconnect),
    ("answering", "the server closes, the request has not begun"): Event(close_before_its_turn),
    ("lingering", "bytes arrive"): sends(AT_ONCE),
    ("lingering", "the client disconnects"): Event(disconnect),
    ("lingering", "`lingering_s_max` passes"): passes("lingering_s_max"),
}


def test_every_row_of_the_table_is_tested() -> None:
    assert [row[:2] for row in rows_of(Connection)] == list(EVENTS)


@pytest.mark.parametrize(("state", "event", "expected"), rows_of(Connection))
def test_connection_changes_its_state_as_the_table_says(
    state: str, event: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0

    def advance(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    monkeypatch.setattr(clients, "clock", lambda: now_s)
    monkeypatch.setattr(clients, "IDLE_CHECK_S", 0.01)
    happens = EVENTS[state, event]

    async def test() -> None:
        app = HoldingApp()
        config: Any = {"shutdown_s_max": 0.0, **happens.config}
        async with (
            asyncio.timeout(WAIT_S),
            http_server(app, HttpConfig(**config), Listen("127.0.0.1:0")) as server,
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(AT_ONCE)
            await reader.readuntil(b"\r\n\r\n")
            stage = Stage(app, writer, connection_of(server), server.context, advance)
            await stage.reach("idle")
            writer.write(INTO[state] if happens.into is None else happens.into)
            await stage.reach(state)

            await happens.play(stage)

            await stage.reach(expected)
            writer.close()

    run_async(test())


def connection_of(server: HttpServer) -> Connection:
    """The only one that is open."""
    [connection] = server.context.clients._open
    assert isinstance(connection, Connection)
    return connection
