"""SessionListener: each connection is a session of its own, and none outlives the listener."""

import asyncio

import pytest
from structlog.testing import capture_logs

from services.runtime.process import StartupError
from services.worker import listener as listener_module
from services.worker.listener import Connection, SessionListener
from tests.support.doubles import run_async
from tests.support.raw_session import RecordingTransport, open_raw_session


async def hang(_: Connection) -> None:
    await asyncio.Event().wait()


def test_connections_are_served_at_the_same_time() -> None:
    async def scenario() -> list[str]:
        came: list[str] = []
        both = asyncio.Event()

        async def attach(connection: Connection) -> None:
            came.append(connection.peer)
            if len(came) == 2:
                both.set()
            await both.wait()
            connection.abort()

        async with SessionListener(attach) as listener:
            address = await listener.start("127.0.0.1:0")
            lines = [await open_raw_session(address) for _ in range(2)]
            for line in lines:
                await line.until_over()
                line.close()
        return came

    assert len(set(run_async(scenario()))) == 2


def test_bug_in_one_session_is_logged_and_the_others_go_on() -> None:
    async def scenario() -> None:
        async def attach(connection: Connection) -> None:
            connection.close()
            raise ValueError("a bug")

        async with SessionListener(attach) as listener:
            address = await listener.start("127.0.0.1:0")
            for _ in range(2):
                line = await open_raw_session(address)
                await line.until_over()
                line.close()

    with capture_logs() as logs:
        run_async(scenario())

    assert [line["event"] for line in logs] == ["bug in a session"] * 2


def test_session_without_room_is_closed_and_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        attached: list[Connection] = []

        async def attach(connection: Connection) -> None:
            attached.append(connection)
            connection.close()

        async with SessionListener(attach) as listener:
            address = await listener.start("127.0.0.1:0")
            monkeypatch.setattr(listener_module, "is_reserved", lambda _: True)
            for _ in range(2):
                line = await open_raw_session(address)
                await line.until_over()
                line.close()
            assert attached == []

            monkeypatch.undo()
            line = await open_raw_session(address)
            await line.until_over()
            line.close()
            assert len(attached) == 1

    with capture_logs() as logs:
        run_async(scenario())

    assert [line["event"] for line in logs] == ["no room for more sessions"]


def test_exit_ends_hanging_sessions_and_raises_the_error_of_the_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.worker.listener.CLOSE_GRACE_S", 0.01)

    async def scenario(error: Exception | None) -> None:
        began = asyncio.Event()

        async def attach(connection: Connection) -> None:
            began.set()
            await hang(connection)

        async with SessionListener(attach) as listener:
            line = await open_raw_session(await listener.start("127.0.0.1:0"))
            await began.wait()
            line.close()
            if error is not None:
                raise error

    run_async(scenario(None))
    with pytest.raises(ValueError, match="mine"):
        run_async(scenario(ValueError("mine")))


def test_connection_that_arrives_during_the_exit_is_aborted() -> None:
    """A bug: its session was started in a task group that had ended."""

    async def scenario() -> RecordingTransport:
        async with SessionListener(hang) as listener:
            await listener.start("127.0.0.1:0")
        listener._new_connection().connection_made(wire := RecordingTransport())
        return wire

    assert run_async(scenario()).end == "aborted"


def test_cancelled_exit_leaves_no_session_behind() -> None:
    async def scenario() -> bool:
        began, ended, leaving = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def attach(_: Connection) -> None:
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        async def listen() -> None:
            async with SessionListener(attach) as listener:
                line = await open_raw_session(await listener.start("127.0.0.1:0"))
                await began.wait()
                line.close()
                leaving.set()

        listening = asyncio.create_task(listen())
        await leaving.wait()  # And so it waits for its session by now.
        listening.cancel()
        await asyncio.wait([listening])
        return ended.is_set()

    assert run_async(scenario())


def test_port_in_use_is_reported_in_one_sentence() -> None:
    async def scenario() -> None:
        async with SessionListener(hang) as one, SessionListener(hang) as other:
            await other.start(await one.start("127.0.0.1:0"))

    with pytest.raises(StartupError, match=r"cannot listen for sessions on .*: the port is in use.*--session-listen"):
        run_async(scenario())


def test_any_ipv6_address_includes_any_ipv4_address() -> None:
    async def scenario() -> None:
        began = asyncio.Event()

        async def attach(_: Connection) -> None:
            began.set()

        async with SessionListener(attach) as listener:
            address = await listener.start("[::]:0")
            line = await open_raw_session(f"127.0.0.1:{address.rpartition(':')[2]}")
            await began.wait()
            line.close()

    run_async(scenario())
