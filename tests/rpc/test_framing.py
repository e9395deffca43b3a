"""FrameConnection: complete messages in order, however the bytes are split, and an end at a protocol violation."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from services.core.errors import Failure, Reason
from services.rpc.framing import PREAMBLE, FrameConnection
from services.rpc.status import MESSAGE_BYTES_MAX
from services.stubs.worker_pb2 import FrontendMessage, WorkerMessage
from tests.support.doubles import run_async
from tests.support.raw_session import (
    GREETING,
    RawSession,
    RecordingTransport,
    frame,
    open_raw_session,
    serve_raw_sessions,
)


class Heard:
    """Starts a connection and records its callbacks. `calls`: the messages of each call."""

    def __init__(self, connection: FrameConnection[Any]) -> None:
        self.calls: list[list[Any]] = []
        self.lost: list[Failure] = []
        self.writable_count = 0
        connection.start(on_messages=self.on_messages, on_writable=self.on_writable, on_lost=self.on_lost)

    def on_messages(self, messages: Sequence[Any]) -> None:
        self.calls.append(list(messages))

    def on_writable(self) -> None:
        self.writable_count += 1

    def on_lost(self, failure: Failure) -> None:
        self.lost.append(failure)


def connected(*, is_opener: bool) -> tuple[FrameConnection[Any], RecordingTransport]:
    connection: FrameConnection[Any] = FrameConnection(FrontendMessage, is_opener=is_opener)
    wire = RecordingTransport()
    connection.connection_made(wire)
    return connection, wire


def cancels(*ids: int) -> FrontendMessage:
    return FrontendMessage(cancels=ids)


MESSAGES = [cancels(1), cancels(), cancels(*range(300)), cancels(2, 3)]
SENT = PREAMBLE + b"".join(map(frame, MESSAGES))
READ_BYTES_MAX = 256 * 1024
"""The largest read of uvloop and of asyncio."""


def test_opener_sends_the_preamble_and_then_frames() -> None:
    connection, wire = connected(is_opener=True)

    connection.send(cancels(7))

    assert wire.written == GREETING + frame(cancels(7))


def test_messages_that_arrive_together_are_delivered_in_one_call() -> None:
    connection, _ = connected(is_opener=False)
    heard = Heard(connection)

    connection.data_received(SENT)

    assert heard.calls == [MESSAGES]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 100, len(SENT) - 1])
def test_messages_are_complete_and_in_order_however_the_bytes_are_split(size: int) -> None:
    connection, _ = connected(is_opener=False)
    heard = Heard(connection)

    for start in range(0, len(SENT), size):
        connection.data_received(SENT[start : start + size])

    assert [message for call in heard.calls for message in call] == MESSAGES
    assert heard.lost == []


def test_messages_that_arrive_before_start_are_delivered_at_start() -> None:
    connection, wire = connected(is_opener=False)
    connection.data_received(SENT)
    assert wire.reads == ["paused"]

    heard = Heard(connection)

    assert heard.calls == [MESSAGES]
    assert wire.reads == ["paused", "resumed"]


def test_at_most_one_read_is_buffered_before_start() -> None:
    """A bug: uvloop reads from a connection before `create_connection` returns, and offers no way to prevent it."""
    many = [cancels(*range(number)) for number in range(1500)]

    async def serve(peer: RawSession) -> None:
        for message in many:
            await peer.send(message)
        await peer.until_over()

    async def scenario() -> list[Any]:
        async with serve_raw_sessions(serve) as address:
            host, _, port = address.rpartition(":")
            connection: FrameConnection[FrontendMessage] = FrameConnection(FrontendMessage, is_opener=True)
            await asyncio.get_running_loop().create_connection(lambda: connection, host, int(port))
            while not connection._unread:
                await asyncio.sleep(0)
            for _ in range(100):  # Turns in which it could read more.
                await asyncio.sleep(0)
            assert len(connection._unread) <= READ_BYTES_MAX
            heard = Heard(connection)
            while sum(map(len, heard.calls)) < len(many):
                await asyncio.sleep(0)
            connection.abort()
            return [message for call in heard.calls for message in call]

    assert run_async(scenario()) == many


def test_loss_before_start_is_reported_at_start() -> None:
    """A bug: if the first write failed, the session waited for the full time limit of the welcome."""
    connection, _ = connected(is_opener=True)
    connection.connection_lost(ConnectionResetError("reset by peer"))

    heard = Heard(connection)

    assert [failure.reason for failure in heard.lost] == [Reason.DISCONNECTED]


def test_half_closed_connection_is_lost_at_once_even_if_the_peer_has_unread_data() -> None:
    """A bug: the connection was lost only after everything was sent, which never happens if the peer does not read."""

    async def serve(peer: RawSession) -> None:
        peer.half_close()
        await asyncio.Event().wait()

    class Over(Heard):
        def __init__(self, connection: FrameConnection[Any]) -> None:
            self.is_over = asyncio.Event()
            super().__init__(connection)

        def on_lost(self, failure: Failure) -> None:
            super().on_lost(failure)
            self.is_over.set()

    async def scenario() -> list[Failure]:
        async with serve_raw_sessions(serve) as address:
            host, _, port = address.rpartition(":")
            connection: FrameConnection[WorkerMessage] = FrameConnection(WorkerMessage, is_opener=True)
            await asyncio.get_running_loop().create_connection(lambda: connection, host, int(port))
            while connection.is_writable:
                connection.send(cancels(*range(100_000)))
            over = Over(connection)
            await over.is_over.wait()
            return over.lost

    assert [failure.reason for failure in run_async(scenario())] == [Reason.DISCONNECTED]


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"GET / HTTP/1.1\r\n", "does not begin"),
        (PREAMBLE + (MESSAGE_BYTES_MAX + 1).to_bytes(4, "big"), "at most"),
        (PREAMBLE + frame(b"\xff"), "cannot be decoded"),
    ],
)
def test_bytes_that_break_the_protocol_end_the_connection(sent: bytes, why: str) -> None:
    connection, wire = connected(is_opener=False)
    heard = Heard(connection)

    connection.data_received(sent)
    connection.data_received(frame(cancels(1)))
    connection.connection_lost(None)

    assert (heard.calls, wire.end) == ([], "aborted")
    assert [failure.reason for failure in heard.lost] == [Reason.PROTOCOL_VIOLATION]
    assert why in heard.lost[0].detail


def test_messages_before_the_violation_are_delivered() -> None:
    connection, _ = connected(is_opener=False)
    heard = Heard(connection)

    connection.data_received(PREAMBLE + frame(cancels(1)) + frame(b"\xff"))

    assert heard.calls == [[cancels(1)]]
    assert len(heard.lost) == 1


def test_loss_is_reported_once() -> None:
    connection, _ = connected(is_opener=False)
    heard = Heard(connection)

    connection.connection_lost(ConnectionResetError("reset by peer"))
    connection.connection_lost(None)

    assert [failure.reason for failure in heard.lost] == [Reason.DISCONNECTED]


@pytest.mark.parametrize(("hang_up", "how"), [(FrameConnection.close, "closed"), (FrameConnection.abort, "aborted")])
def test_closed_connection_calls_and_sends_nothing_more(hang_up: Any, how: str) -> None:
    connection, wire = connected(is_opener=True)
    heard = Heard(connection)

    hang_up(connection)
    connection.data_received(frame(cancels(1)))
    connection.connection_lost(None)
    connection.send(cancels(2))

    assert (heard.calls, heard.lost) == ([], [])
    assert (wire.end, wire.written) == (how, PREAMBLE)


def test_connection_is_not_writable_while_the_peer_is_slow_to_read() -> None:
    connection, _ = connected(is_opener=True)
    heard = Heard(connection)

    connection.pause_writing()
    assert not connection.is_writable
    connection.resume_writing()

    assert connection.is_writable
    assert heard.writable_count == 1


@pytest.mark.parametrize(("is_over", "reads"), [(False, ["paused", "resumed"]), (True, ["paused"])])
def test_pause_for_resumes_reading_by_itself(is_over: bool, reads: list[str]) -> None:
    async def scenario() -> list[str]:
        connection, wire = connected(is_opener=True)
        rested = asyncio.Event()
        wire.reads.clear()
        connection.pause_for(0.001)
        asyncio.get_running_loop().call_later(0.002, rested.set)
        assert wire.reads == ["paused"]
        if is_over:
            connection.abort()
        await rested.wait()
        return wire.reads

    assert run_async(scenario()) == reads


def test_pause_stops_reading_until_resume() -> None:
    async def scenario() -> list[str]:
        connection, wire = connected(is_opener=True)
        wire.reads.clear()
        connection.pause()
        connection.resume()
        connection.abort()
        connection.pause()
        return wire.reads

    assert run_async(scenario()) == ["paused", "resumed"]


def test_nagles_algorithm_is_off() -> None:
    """A bug: with Nagle's algorithm each first token came 40 ms late. uvloop turns it off, asyncio does not always."""

    async def serve(peer: RawSession) -> None:
        for _ in range(20):
            await peer.read()
            await peer.send(WorkerMessage())
            await peer.send(WorkerMessage())

    async def scenario() -> None:
        async with serve_raw_sessions(serve) as address:
            host, _, port = address.rpartition(":")
            connection: FrameConnection[WorkerMessage] = FrameConnection(WorkerMessage, is_opener=True)
            transport, _ = await asyncio.get_running_loop().create_connection(lambda: connection, host, int(port))
            assert transport.get_extra_info("socket").getsockopt(6, 1) == 1
            connection.abort()

    run_async(scenario())


def test_opener_and_acceptor_exchange_messages() -> None:
    async def scenario() -> list[Any]:
        accepted: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def accept() -> FrameConnection[FrontendMessage]:
            return FrameConnection(FrontendMessage, is_opener=False, on_connected=accepted.set_result)

        server = await asyncio.get_running_loop().create_server(accept, "127.0.0.1", 0)
        peer = await open_raw_session(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        await peer.send(cancels(1))
        await peer.send(cancels(2))
        connection = await accepted
        heard = Heard(connection)
        while sum(map(len, heard.calls)) < 2:
            await asyncio.sleep(0)
        connection.send(WorkerMessage(begun=[3]))
        assert connection.peer.startswith("127.0.0.1:")
        answer = await peer.read()
        peer.close()
        connection.close()
        server.close()
        return [*heard.calls, answer]

    *calls, answer = run_async(scenario())

    assert [message for call in calls for message in call] == [cancels(1), cancels(2)]
    assert answer == WorkerMessage(begun=[3])
