"""A connection changes its state as the table in its docstring says, and in no other way."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import pytest

from services.http.h2 import connection as connection_module
from services.http.h2.connection import DRAIN_PING, H2Connection
from services.http.h2.wire.frames import ACK, PING, frame
from services.http.server.config import HttpConfig
from tests.http.h2.support import COMPLETIONS, STREAMED, Client, connected, connection_of
from tests.http.support import Script, run, serving
from tests.support.tables import rows_of

SHORT_S = 0.2
PONG = frame(PING, ACK, 0, DRAIN_PING)


@dataclass
class Stage:
    """A connection with a stream, unless the event is about one without."""

    client: Client
    connection: H2Connection
    more: asyncio.Event

    async def reach(self, state: str) -> None:
        while self.connection.state != state:
            await asyncio.sleep(0.001)


Play = Callable[[Stage], Awaitable[None]]


@dataclass(frozen=True)
class Event:
    """What happens. `config`: bounds that pass. `has_stream`: whether a stream is open before."""

    play: Play
    has_stream: bool = True
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
    ("serving", "the process drains"): Event(drain),
    ("serving", "`keepalive_s` passes without a stream"): Event(wait, False, {"keepalive_s": SHORT_S}),
    ("serving", "the client breaks the protocol or passes a bound"): Event(break_protocol),
    ("serving", "the client disconnects"): Event(disconnect),
    ("leaving", "the client answers the PING, a stream is open"): Event(pong),
    ("leaving", "the client answers the PING, no stream is open"): Event(pong, False),
    ("leaving", "GOAWAY_S_MAX passes, a stream is open"): Event(wait, goaway_s=SHORT_S),
    ("leaving", "the client breaks the protocol or passes a bound"): Event(break_protocol),
    ("left", "the last stream ends"): Event(end_stream),
    ("left", "the client breaks the protocol or passes a bound"): Event(break_protocol),
    ("lingering", "the client disconnects"): Event(disconnect),
    ("lingering", "`lingering_s_max` passes"): Event(wait, config={"lingering_s_max": SHORT_S}),
}


async def into_leaving(stage: Stage) -> None:
    stage.connection.drain()


async def into_left(stage: Stage) -> None:
    stage.connection.drain()
    stage.client.send(PONG)


INTO: Mapping[str, Play] = {
    "serving": wait,
    "leaving": into_leaving,
    "left": into_left,
    "lingering": break_protocol,
}


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
        async with serving(Script("a", more), config=config) as server, connected(server) as client:
            await client.until(lambda: client.seen)
            if happens.has_stream:
                stream_id = client.post(COMPLETIONS, STREAMED)
                await client.until(lambda: client.answers[stream_id].headers)
            stage = Stage(client, connection_of(server), more)
            await INTO[state](stage)
            await stage.reach(state)

            await happens.play(stage)

            await stage.reach(expected)
            more.set()

    run(test)
