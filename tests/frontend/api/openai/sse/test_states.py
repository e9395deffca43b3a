"""A stream changes its state as the table in its docstring says, and in no other way."""

import asyncio
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from services.core.call import Call
from services.core.errors import Reason
from services.core.flow.client_flow import ClientBounds
from services.core.interface import Delta, Usage
from services.core.request import FinishReason, Request
from services.frontend.api.openai.responses import CompletionAnswer
from services.frontend.api.openai.sse import stream
from services.frontend.api.openai.sse.stream import SseStream
from services.http.h1.connection import Connection
from services.http.server.config import HttpConfig
from services.http.server.cork import Cork
from services.http.server.messages import HttpRequest
from services.models.tokenizers.byte_level import ByteTokenizer
from tests.support.doubles import make_kept, make_request, run_async
from tests.support.raw_session import RecordingTransport
from tests.support.tables import rows_of

BUFFER_BYTES_MAX = 1000


class FillableTransport(RecordingTransport):
    """A transport whose buffer is as full as a test says."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__()
        self._sock = sock
        self.size = 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """The test calls `pause_writing` itself."""

    def get_write_buffer_size(self) -> int:
        return self.size

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._sock if name == "socket" else default


@dataclass
class Context:
    """What a connection shares with others, as far as a stream asks for it."""

    cork: Cork
    clients: set[Connection]


@dataclass
class Stage:
    """A stream, and the connection that it writes to."""

    stream: SseStream
    connection: Connection
    transport: FillableTransport
    position: int = 0

    def deliver(self, text: str = "x") -> None:
        self.stream.deliver(Delta(self.position, [1], text))
        self.position += 1

    def fill(self) -> None:
        self.transport.size = BUFFER_BYTES_MAX // 2
        self.connection.pause_writing()

    async def empty(self) -> None:
        """The client reads everything; what is buffered is written."""
        self.transport.size = 0
        self.connection.resume_writing()
        for _ in range(3):
            await asyncio.sleep(0)


def into_open(stage: Stage) -> None:
    stage.deliver()


def into_slow(stage: Stage) -> None:
    stage.deliver()
    stage.fill()


def into_left(stage: Stage) -> None:
    stage.deliver()
    stage.transport.close()
    stage.deliver()


INTO: Mapping[str, Callable[[Stage], None]] = {
    "waiting": lambda stage: None,
    "open": into_open,
    "slow": into_slow,
    "left": into_left,
}


async def deliver(stage: Stage) -> None:
    stage.deliver()


async def deliver_nothing(stage: Stage) -> None:
    stage.deliver("")


async def deliver_to_nobody(stage: Stage) -> None:
    stage.transport.close()
    stage.deliver()


async def fill(stage: Stage) -> None:
    stage.fill()


async def catch_up(stage: Stage) -> None:
    stage.deliver()
    await stage.empty()
    stage.deliver()


async def pass_a_bound(stage: Stage) -> None:
    stage.deliver("x" * BUFFER_BYTES_MAX)


async def pause(stage: Stage) -> None:
    stage.stream._on_pause()


async def pause_for_nobody(stage: Stage) -> None:
    stage.transport.close()
    stage.stream._on_pause()


async def catch_up_and_pause(stage: Stage) -> None:
    stage.deliver()
    await stage.empty()
    stage.stream._on_pause()


EVENTS: Mapping[tuple[str, str], Callable[[Stage], Any]] = {
    ("waiting", "a delta with an event"): deliver,
    ("waiting", "a delta without an event"): deliver_nothing,
    ("waiting", "a delta with an event, the client is gone"): deliver_to_nobody,
    ("waiting", "a pause"): pause,
    ("waiting", "a pause, the client is gone"): pause_for_nobody,
    ("open", "a delta"): deliver,
    ("open", "too much is unsent"): fill,
    ("open", "a delta, the client is gone"): deliver_to_nobody,
    ("open", "a pause"): pause,
    ("slow", "a delta, too much is unsent"): deliver,
    ("slow", "a delta, nothing is buffered any more"): catch_up,
    ("slow", "a delta, the client is gone"): deliver_to_nobody,
    ("slow", "the client passes a bound"): pass_a_bound,
    ("slow", "a pause, too much is unsent"): pause,
    ("slow", "a pause, nothing is buffered any more"): catch_up_and_pause,
    ("left", "a delta"): deliver,
    ("left", "a pause"): pause,
}


@contextmanager
def stage_of() -> Iterator[Stage]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        context: Any = Context(Cork(), set())
        connection, transport = Connection(context), FillableTransport(ours)
        connection.connection_made(transport)
        answer = CompletionAnswer(request_id="r", model="m")
        config = HttpConfig(client=ClientBounds(buffer_bytes_max=BUFFER_BYTES_MAX))
        request = HttpRequest(method="POST", path="/", headers={}, id="r")
        stream = SseStream(request, connection, answer, config, ByteTokenizer)
        stream._prepare(Request(model="m"), Call(request_id="r"))
        yield Stage(stream, connection, transport)
        stream._stop_backlog()


def test_every_row_of_the_table_is_tested() -> None:
    assert [row[:2] for row in rows_of(stream)] == list(EVENTS)


@pytest.mark.parametrize(("state", "event", "expected"), rows_of(stream))
def test_stream_changes_its_state_as_the_table_says(state: str, event: str, expected: str) -> None:
    async def test() -> None:
        with stage_of() as stage:
            INTO[state](stage)
            assert stage.stream.state == state

            await EVENTS[state, event](stage)

            assert stage.stream.state == expected

    run_async(test())


@pytest.mark.parametrize("is_resumed", [True, False])
def test_client_may_leave_as_much_more_unread_as_comes_from_the_record_of_the_answer_that_it_resumes(
    is_resumed: bool,
) -> None:
    """A bug: workers send records faster than any client reads, so an answer longer than the bound cut its client."""
    kept = make_kept()
    kept.generation.is_resumed, kept.generation.record_ends = is_resumed, {0: 3} if is_resumed else {}

    async def test() -> list[str]:
        with stage_of() as stage:
            stage.stream._keep(kept, make_request(), stage.stream._ending)
            into_slow(stage)
            states = []
            for _ in range(3):  # The record ends before the third one.
                stage.deliver("x" * BUFFER_BYTES_MAX)
                states.append(stage.stream.state)
            return states

    assert run_async(test()) == (["slow", "slow", "left"] if is_resumed else ["left"] * 3)


@pytest.mark.parametrize(
    ("event", "reason"), [(deliver_to_nobody, Reason.CANCELLED), (pass_a_bound, Reason.SLOW_CLIENT)]
)
def test_stream_that_is_left_has_failed_its_request_with_the_reason(
    event: Callable[[Stage], Any], reason: Reason
) -> None:
    async def test() -> None:
        with stage_of() as stage:
            into_slow(stage)

            await event(stage)

            ending = stage.stream._ending
            assert ending is not None
            assert ending.failure is not None
            assert ending.failure.reason is reason

    run_async(test())


def test_stream_that_is_left_writes_nothing_more() -> None:
    async def test() -> None:
        with stage_of() as stage:
            into_left(stage)
            written = stage.transport.written

            stage.deliver()

            assert stage.transport.written == written

    run_async(test())


def comments_after(prepare: Callable[[Stage], Any]) -> int:
    """How many comments a pause sends after `prepare`."""

    async def test() -> int:
        with stage_of() as stage:
            prepare(stage)
            stage.stream._on_pause()
            return stage.transport.written.count(b": keepalive")

    return run_async(test())


@pytest.mark.parametrize("state", ["waiting", "open"])
def test_pause_sends_a_comment_to_a_client_that_waits(state: str) -> None:
    assert comments_after(INTO[state]) == 1


@pytest.mark.parametrize("state", ["slow", "left"])
def test_pause_sends_nothing_to_a_client_that_is_slow_or_gone(state: str) -> None:
    assert comments_after(INTO[state]) == 0


def test_comments_do_not_pile_up_for_a_client_that_takes_nothing() -> None:
    def leave_unread(stage: Stage) -> None:
        stage.deliver()
        stage.transport.size = 1

    assert comments_after(leave_unread) == 0


def test_no_comment_follows_the_last_event_which_waits_for_the_end() -> None:
    """It would come before the head if the last event is the first."""

    def end(stage: Stage) -> None:
        stage.stream.deliver(Delta(0, [1], "x", finish_reason=FinishReason.STOP, usage=Usage(1, 1)))

    assert comments_after(end) == 0


def test_client_that_has_caught_up_in_a_pause_gets_comments_again() -> None:
    async def test() -> bytes:
        with stage_of() as stage:
            into_slow(stage)
            stage.deliver()
            await stage.empty()
            stage.stream._on_pause()
            return stage.transport.written

    assert run_async(test()).endswith(b": keepalive\n\n\r\n")
