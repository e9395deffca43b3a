"""SessionReader: messages are handled in order, merged if several arrive together, cut if they are very large."""

import asyncio
from collections.abc import Callable

import pytest

from services.frontend.session.reader import (
    ENDS_AWAITED_MAX,
    REST_S_MAX,
    REST_S_MIN,
    STREAMS_A_TURN_MAX,
    STREAMS_AT_ONCE_MAX,
    TOKENS_SHARE_MAX,
    ReadThrottle,
    SessionReader,
    rest_s,
)
from services.http.server.cork import Cork
from services.rpc.framing import FrameConnection
from services.stubs.worker_pb2 import Load, Step, StreamEnd, WorkerMessage
from tests.support.clock import pass_time, run_clocked
from tests.support.raw_session import RecordingTransport


class Quiet(FrameConnection[WorkerMessage]):
    """A connection that records when it is paused and resumed."""

    def __init__(self) -> None:
        super().__init__(WorkerMessage, is_opener=True)
        self.rests: list[float] = []
        self.is_paused = False

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False

    def pause_for(self, delay_s: float) -> None:
        self.rests.append(delay_s)


class Stage:
    """A reader with its connection, and the messages it has handed over. `wants`: how many messages are wanted."""

    def __init__(self, wants: int = 1000, throttle: ReadThrottle | None = None) -> None:
        self.handled: list[WorkerMessage] = []
        self.wants = wants
        self.connection = Quiet()
        self.cork = Cork()
        self.handle: Callable[[WorkerMessage], bool] = self._handle
        self.reader = SessionReader(lambda message: self.handle(message), throttle or ReadThrottle(), self.cork)
        self.reader.connect(self.connection)
        pass_time(60)

    def _handle(self, message: WorkerMessage) -> bool:
        self.handled.append(message)
        return len(self.handled) < self.wants

    @property
    def stream_counts(self) -> list[int]:
        return [len(message.step.stream_ids) for message in self.handled]


def step(streams: int, position: int = 0) -> WorkerMessage:
    """A message with a token for each of `streams` streams."""
    return WorkerMessage(
        step=Step(
            stream_ids=range(1, streams + 1),
            positions=[position] * streams,
            token_counts=[1] * streams,
            token_ids=[7] * streams,
        )
    )


def test_messages_that_arrive_together_are_merged() -> None:
    async def scenario() -> Stage:
        stage = Stage()
        stage.reader.on_messages([step(2), step(2, position=1)])
        return stage

    stage = run_clocked(scenario())

    assert [list(message.step.token_counts) for message in stage.handled] == [[2, 2]]


def test_step_with_few_streams_is_handled_at_once() -> None:
    async def scenario() -> Stage:
        stage = Stage()
        stage.reader.on_messages([step(STREAMS_AT_ONCE_MAX)])
        return stage

    stage = run_clocked(scenario())

    assert stage.stream_counts == [STREAMS_AT_ONCE_MAX]
    assert not stage.connection.is_paused


def test_step_with_very_many_streams_is_handled_a_part_a_turn_and_reading_pauses() -> None:
    async def scenario() -> list[int]:
        stage, turns = Stage(), []
        stage.reader.on_messages([step(STREAMS_AT_ONCE_MAX + 1)])
        while stage.connection.is_paused:
            turns.append(len(stage.handled))
            await asyncio.sleep(0)
        assert sum(stage.stream_counts) == STREAMS_AT_ONCE_MAX + 1
        return turns

    assert run_clocked(scenario()) == list(range(1, STREAMS_AT_ONCE_MAX // STREAMS_A_TURN_MAX + 1))


def test_writes_of_one_turn_leave_together_even_after_a_bug() -> None:
    async def scenario() -> list[bytes]:
        stage, wire, written = Stage(), RecordingTransport(), []

        def handle(message: WorkerMessage) -> bool:
            stage.cork.write(wire, b"token")
            written.append(wire.written)
            assert message.step.positions[0] == 0, "a bug"
            return True

        stage.handle = handle
        with pytest.raises(AssertionError, match="a bug"):
            stage.reader.on_messages([WorkerMessage(step=one) for one in (step(2).step, step(2, position=5).step)])
        stage.cork.write(wire, b"more")
        return [*written, wire.written]

    assert run_clocked(scenario()) == [b"", b"", b"tokentokenmore"]


def pieces_of(*messages: WorkerMessage) -> list[bytes]:
    """The writes that one client gets. Each message writes a token, and each end wakes a task that writes the end."""

    async def scenario() -> list[bytes]:
        stage, wire = Stage(), RecordingTransport()

        def handle(message: WorkerMessage) -> bool:
            stage.cork.write(wire, b"token ")
            for _ in message.ends:
                asyncio.get_running_loop().call_soon(stage.cork.write, wire, b"end")
            return True

        stage.handle = handle
        stage.reader.on_messages(messages)
        for _ in range(20):
            await asyncio.sleep(0)
        assert stage.cork.write(wire, b"") is False, "the cork is released"
        return wire.pieces[:-1]

    return run_clocked(scenario())


def test_end_of_a_stream_leaves_with_its_last_token() -> None:
    assert pieces_of(step(1)) == [b"token "]
    assert pieces_of(WorkerMessage(step=step(1).step, ends=[StreamEnd(stream_id=1)])) == [b"token end"]


@pytest.mark.parametrize(("ends", "waits"), [(ENDS_AWAITED_MAX, True), (ENDS_AWAITED_MAX + 1, False)])
def test_tokens_wait_for_a_bounded_number_of_ends(ends: int, waits: bool) -> None:
    pieces = pieces_of(WorkerMessage(step=step(1).step, ends=[StreamEnd(stream_id=1)] * ends))

    assert pieces == ([b"token " + b"end" * ends] if waits else [b"token ", *[b"end"] * ends])


def test_tokens_of_a_later_turn_do_not_wait_for_ends() -> None:
    many = WorkerMessage(step=step(STREAMS_AT_ONCE_MAX + 1).step, ends=[StreamEnd(stream_id=1)])

    pieces = pieces_of(many)

    assert len(pieces) > STREAMS_AT_ONCE_MAX // STREAMS_A_TURN_MAX
    assert pieces[-2:] == [b"token ", b"end"]


def test_no_message_is_handled_after_one_that_wants_no_more() -> None:
    async def scenario() -> Stage:
        stage = Stage(wants=2)
        stage.reader.on_messages([step(STREAMS_AT_ONCE_MAX + 1)])
        for _ in range(10):
            await asyncio.sleep(0)
        return stage

    assert run_clocked(scenario()).stream_counts == [STREAMS_A_TURN_MAX] * 2


def test_pause_counts_the_time_of_other_sessions() -> None:
    async def scenario() -> list[float]:
        throttle = ReadThrottle()
        stage = Stage(throttle=throttle)
        stage.reader.on_messages([WorkerMessage(load=Load(running=1))])
        assert stage.connection.rests == []
        throttle.spent_s += 1.0  # Spent on other sessions since the last rest.
        stage.reader.on_messages([WorkerMessage(load=Load(running=1))])
        return stage.connection.rests

    assert run_clocked(scenario()) == [REST_S_MAX]


@pytest.mark.parametrize("ends", [0, 1], ids=["at once", "after the ends"])
def test_time_of_the_held_writes_counts_as_time_of_tokens(ends: int) -> None:
    class SlowTransport(RecordingTransport):
        def write(self, data: object) -> None:
            super().write(data)
            pass_time(0.5)

    async def scenario() -> float:
        throttle = ReadThrottle()
        stage, wire = Stage(throttle=throttle), SlowTransport()
        stage.handle = lambda _: stage.cork.write(wire, b"token")
        stage.reader.on_messages([WorkerMessage(step=step(1).step, ends=[StreamEnd(stream_id=1)] * ends)])
        await asyncio.sleep(0)
        assert wire.written == b"token"
        return throttle.spent_s

    assert run_clocked(scenario()) == 0.5


@pytest.mark.parametrize(
    ("spent_s", "elapsed_s", "rest"),
    [
        (0.0, 60.0, 0.0),
        (0.002, 0.002 / TOKENS_SHARE_MAX, 0.0),
        (0.002, 0.001, 0.002 / TOKENS_SHARE_MAX - 0.001),
        (REST_S_MIN * TOKENS_SHARE_MAX * 0.9, 0.0, 0.0),
        (1.0, 0.0, REST_S_MAX),
    ],
    ids=["no tokens", "exactly the share", "more than the share", "too short", "longest"],
)
def test_pause_is_as_long_as_the_share_of_tokens_asks_for(spent_s: float, elapsed_s: float, rest: float) -> None:
    assert rest_s(spent_s, elapsed_s) == pytest.approx(rest)
