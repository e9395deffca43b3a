"""Idle connections are closed after their time, and a closing server lets running answers end within a bound."""

import asyncio

import pytest

from services.http.server import clients as clients_module
from services.http.server.clients import Clients
from tests.support.doubles import run_async
from tests.support.raw_session import RecordingTransport

KEEPALIVE_S = 60.0


class Client:
    """An open connection."""

    def __init__(self, task: asyncio.Task[None] | None = None) -> None:
        self.recorded = RecordingTransport()
        self.is_drained = False
        self.tasks: tuple[asyncio.Task[None], ...] = () if task is None else (task,)

    def drain(self) -> None:
        self.is_drained = True

    def leave(self) -> None:
        self.recorded.close()

    def close(self) -> None:
        if not self.tasks:
            self.leave()

    def abort(self) -> None:
        self.recorded.abort()
        for task in self.tasks:
            task.cancel()


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in a list of one, by which idle connections are measured. They are checked all the time."""
    now = [0.0]
    monkeypatch.setattr(clients_module, "clock", lambda: now[0])
    monkeypatch.setattr(clients_module, "IDLE_CHECK_S", 0.0)
    return now


async def check() -> None:
    """Let the timer of idle connections run."""
    for _ in range(3):
        await asyncio.sleep(0.001)


def test_connection_that_is_idle_for_its_time_is_closed_and_others_are_not(now: list[float]) -> None:
    async def test() -> None:
        clients, old, young, busy = Clients(KEEPALIVE_S), Client(), Client(), Client()
        for client in (old, busy):
            clients.add(client)
        clients.set_busy(busy)
        now[0] = KEEPALIVE_S / 2
        clients.add(young)

        now[0] = KEEPALIVE_S
        await check()

        assert [one.recorded.is_closing() for one in (old, young, busy)] == [True, False, False]
        await clients.close(0)

    run_async(test())


def test_idle_time_goes_on_if_a_connection_is_set_idle_again(now: list[float]) -> None:
    async def test() -> None:
        clients, client = Clients(KEEPALIVE_S), Client()
        clients.add(client)
        now[0] = KEEPALIVE_S / 2
        clients.set_idle(client)

        now[0] = KEEPALIVE_S
        await check()

        assert client.recorded.is_closing()
        await clients.close(0)

    run_async(test())


def test_draining_tells_all_clients() -> None:
    async def test() -> None:
        clients, client = Clients(KEEPALIVE_S), Client()
        clients.add(client)

        clients.drain()

        assert client.is_drained
        await clients.close(0)

    run_async(test())


def test_length_is_the_number_of_open_connections() -> None:
    async def test() -> None:
        clients, client = Clients(KEEPALIVE_S), Client()

        clients.add(client)
        assert len(clients) == 1
        clients.remove(client)
        assert len(clients) == 0
        await clients.close(0)

    run_async(test())


@pytest.mark.parametrize("ends", [True, False])
def test_close_waits_a_bounded_time_for_running_answers(ends: bool) -> None:
    async def test() -> None:
        async def answer() -> None:
            await asyncio.sleep(0 if ends else KEEPALIVE_S)

        async with asyncio.TaskGroup() as group:
            clients, quiet, answering = Clients(KEEPALIVE_S), Client(), Client(group.create_task(answer()))
            for client in (quiet, answering):
                clients.add(client)

            await clients.close(seconds_max=KEEPALIVE_S if ends else 0.01)

        assert quiet.recorded.is_closing()
        assert answering.tasks[0].cancelled() is not ends

    run_async(test())


def test_connection_that_comes_while_the_server_closes_is_closed() -> None:
    async def test() -> None:
        clients, late = Clients(KEEPALIVE_S), Client()
        await clients.close(0)

        clients.add(late)

        assert late.recorded.end == "aborted"
        assert len(clients) == 0

    run_async(test())
