"""A connection changes its state as the table in its docstring says, and in no other way."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import grpc
import pytest

from services.http.grpc.routes import GrpcRoutes
from services.http.h2 import connection as connection_module
from services.http.h2.connection import DRAIN_PING, H2Connection
from services.http.h2.wire.frames import ACK, PING, frame
from services.http.server.config import HttpConfig
from tests.http.grpc.support import HEADERS, message
from tests.http.h2.support import COMPLETIONS, STREAMED, Client, connected, connection_of
from tests.http.support import Script, run, serving
from tests.support.tables import rows_of

SHORT_S = 0.2
PONG = frame(PING, ACK, 0, DRAIN_PING)


@dataclass
class Stage:
    """A connection with a stream of either kind, unless the event is about one without."""

    client: Client
    connection: H2Connection
    more: asyncio.Event

    async def reach(self, state: str) -> None:
        while self.connection.state != state:
            await asyncio.sleep(0.001)


Play = Callable[[Stage], Awaitable[None]]
Kind = Literal["http", "rpc", "none"]


@dataclass(frozen=True)
class Event:
    """What happens. `config`: bounds that pass. `stream`: the kind of the stream that is open before."""

    play: Play
    stream: Kind = "rpc"
    config: Mapping[str, float] = field(default_factory=dict)
    goaway_s: float = 60.0


async def drain(stage: Stage) -> None:
    stage.connection.drain()


async def break_protocol(stage: Stage) -> None:
    stage.client.send(frame(PING, 0, 0, b"short"))


async def disconnect(stage: Stage) -> None:
    stage.client.writer.transport.abort()


async def pong(stage: Stage) -> None:
    stage.client.send(PONG)


async def end_stream(stage: Stage) -> None:
    stage.more.set()


async def wait(stage: Stage) -> None:
    """The event loop lets it pass."""


EVENTS: Mapping[tuple[str, str], Event] = {
    ("serving", "the process drains, no request of the HTTP API is open"): Event(drain),
    ("serving", "the process drains, one is open"): Event(drain, "http"),
    ("serving", "`keepalive_s` passes without a stream"): Event(wait, "none", {"keepalive_s": SHORT_S}),
    ("serving", "the client breaks the protocol or passes a bound"): Event(break_protocol),
    ("serving", "the client disconnects"): Event(disconnect),
    ("waiting", "the last request of the HTTP API ends"): Event(end_stream, "http"),
    ("waiting", "the client breaks the protocol or passes a bound"): Event(break_protocol, "http"),
    ("leaving", "the client answers the PING, a stream is open"): Event(pong),
    ("leaving", "the client answers the PING, no stream is open"): Event(pong, "none"),
    ("leaving", "GOAWAY_S_MAX passes, a stream is open"): Event(wait, goaway_s=SHORT_S),
    ("leaving", "the client breaks the protocol or passes a bound"): Event(break_protocol),
    ("left", "the last stream ends"): Event(end_stream),
    ("left", "the client breaks the protocol or passes a bound"): Event(break_protocol),
    ("lingering", "the client disconnects"): Event(disconnect),
    ("lingering", "`lingering_s_max` passes"): Event(wait, config={"lingering_s_max": SHORT_S}),
}


async def into_left(stage: Stage) -> None:
    stage.connection.drain()
    stage.client.send(PONG)


INTO: Mapping[str, Play] = {
    "serving": wait,
    "waiting": drain,
    "leaving": drain,
    "left": into_left,
    "lingering": break_protocol,
}


def waiting(more: asyncio.Event) -> Callable[..., Awaitable[bytes]]:
    """A handler that begins its answer, and ends it later."""

    async def behave(_: bytes, context: Any) -> bytes:
        context.send_head()
        await more.wait()
        return b""

    return behave


def test_every_row_of_the_table_is_tested() -> None:
    assert [row[:2] for row in rows_of(H2Connection)] == list(EVENTS)


@pytest.mark.parametrize(("state", "event", "expected"), rows_of(H2Connection))
def test_connection_changes_its_state_as_the_table_says(
    state: str, event: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    happens = EVENTS[state, event]
    monkeypatch.setattr(connection_module, "GOAWAY_S_MAX", happens.goaway_s)

    async def test() -> None:
        more = asyncio.Event()
        config = HttpConfig(shutdown_s_max=0.0, **happens.config)  # type: ignore[arg-type]
        rpcs = GrpcRoutes()
        rpcs.add_registered_method_handlers("test", {"Wait": grpc.unary_unary_rpc_method_handler(waiting(more))})
        async with serving(Script("a", more), config=config, rpcs=rpcs) as server, connected(server) as client:
            await client.until(lambda: client.seen)
            if happens.stream == "http":
                stream_id = client.post(COMPLETIONS, STREAMED)
                await client.until(lambda: client.answers[stream_id].headers)
            elif happens.stream == "rpc":
                stream_id = client.post("/test/Wait", message(b""), HEADERS)
                await client.until(lambda: client.answers[stream_id].headers)
            stage = Stage(client, connection_of(server), more)
            await INTO[state](stage)
            await stage.reach(state)

            await happens.play(stage)

            await stage.reach(expected)
            more.set()

    run(test)
