"""Discovery: a worker stays registered and a frontend keeps its view, whatever becomes of the registries."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from services.discovery import client as client_module
from services.discovery.client import InstanceRecord
from services.discovery.registrar import Registrar
from services.discovery.watcher import Watcher
from services.registry.memory_store import MemoryStore
from services.registry.watch_cache import Entry
from services.rpc.server import GrpcServer
from services.rpc.status import CHANNEL_OPTIONS
from services.runtime import log_throttle
from services.runtime.backoff import Backoff
from services.runtime.loop import run_on_loop
from services.stubs.registry_pb2 import DrainRequest, ListRequest
from tests.registry.support import WAIT_S, Proxy, client, free_port, instance, running, served, until

RECORD = InstanceRecord("w1", "127.0.0.1:9000", "mocker")


class Cluster:
    """Registrars and watchers that run until the scenario ends."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._tasks: list[asyncio.Task[None]] = []
        self.drains: list[str] = []

    def register(self, addresses: list[str], record: InstanceRecord = RECORD, lease_s: int = 10) -> Registrar:
        registrar = Registrar(
            addresses, record, lease_s=lease_s, on_drain=lambda: self.drains.append(record.instance_id)
        )
        self._start(registrar.run())
        return registrar

    def watch(self, addresses: list[str]) -> "Views":
        views = Views(addresses)
        self._start(views.watcher.run())
        return views

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _start(self, running: Any) -> None:
        self._tasks.append(self._group.create_task(running))


class Views:
    """What a watcher said, oldest first. changes: how many records each time; all: what these come to."""

    def __init__(self, addresses: list[str]) -> None:
        self.all: list[Mapping[str, InstanceRecord]] = []
        self.changes: list[int] = []
        self.watcher = Watcher(addresses, self._on_change)

    def _on_change(self, put: Mapping[str, InstanceRecord], gone: Collection[str]) -> None:
        before = self.last or {}
        assert all(before.get(name) != record for name, record in put.items())
        assert all(name in before for name in gone)
        self.changes.append(len(put) + len(gone))
        self.all.append({name: record for name, record in {**before, **put}.items() if name not in gone})

    @property
    def last(self) -> Mapping[str, InstanceRecord] | None:
        return self.all[-1] if self.all else None


def run(scenario: Callable[[Cluster], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            cluster = Cluster(group)
            try:
                await scenario(cluster)
            finally:
                cluster.stop()

    run_on_loop(asyncio.wait_for(main(), 2 * WAIT_S))


@asynccontextmanager
async def memory_registry(port: int = 0) -> AsyncIterator[str]:
    async with running(store := MemoryStore()), served(store, port) as address:
        yield address


@asynccontextmanager
async def deaf_server() -> AsyncIterator[str]:
    """Takes connections and never says a word."""
    connections: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: connections.append(writer), "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        yield f"{host}:{port}"
    finally:
        for writer in connections:
            writer.transport.abort()
        server.close()


# Together


def test_a_worker_that_registers_comes_into_the_view_and_one_that_deregisters_leaves_it() -> None:
    async def scenario(cluster: Cluster) -> None:
        async with memory_registry() as address:
            views = cluster.watch([address])
            registrar = cluster.register([address])

            await until(lambda: views.last == {"w1": RECORD})
            await registrar.deregister()

            await until(lambda: views.last == {})

    run(scenario)


def test_a_registry_killed_and_started_again_empty_is_filled_again(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster) -> None:
        port, ready = free_port(), tmp_path / "ready"
        process = started(port, ready)
        views = cluster.watch([f"127.0.0.1:{port}"])
        cluster.register([f"127.0.0.1:{port}"])
        try:
            await until(lambda: views.last == {"w1": RECORD})

            process.kill()
            process.wait()
            assert views.last == {"w1": RECORD}
            process = started(port, ready)

            await wait_listed(f"127.0.0.1:{port}")
            await until(lambda: views.last == {"w1": RECORD})
        finally:
            process.kill()
            process.wait()

    run(scenario)


async def wait_listed(address: str) -> None:
    """Until the registry there has an instance."""
    async with client(address) as stub, asyncio.timeout(WAIT_S):
        while not (await stub.List(ListRequest())).instances:
            await asyncio.sleep(0.01)


def lost(logs: Sequence[Mapping[str, Any]], what: str) -> bool:
    return any(line["event"].startswith("registry lost") and line["what"] == what for line in logs)


def started(port: int, ready: Path) -> subprocess.Popen[bytes]:
    """A registry process that listens."""
    ready.unlink(missing_ok=True)
    options = ("--listen", f"127.0.0.1:{port}", "--ready-file", str(ready))
    process = subprocess.Popen([sys.executable, "-m", "services", "registry", *options])
    give_up_at = time.monotonic() + WAIT_S
    while not ready.exists():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)
    return process


# Watcher


def test_the_view_is_unknown_before_a_registry_answered_and_stays_when_it_is_gone() -> None:
    async def scenario(cluster: Cluster) -> None:
        port = free_port()
        views = cluster.watch([f"127.0.0.1:{port}"])
        assert not views.watcher.is_synced

        async with memory_registry(port) as address:
            await until(lambda: views.last == {})
            assert views.watcher.is_synced
            cluster.register([address])
            await until(lambda: views.last == {"w1": RECORD})
            logs.clear()

        await until(lambda: lost(logs, "watch") and lost(logs, "registration"))
        assert views.last == {"w1": RECORD}
        assert views.watcher.is_synced

    with capture_logs() as logs:
        run(scenario)


def test_a_reconnect_without_news_is_not_told_and_a_registry_that_is_behind_does_not_take_the_view_back() -> None:
    async def scenario(cluster: Cluster) -> None:
        port = free_port()
        views = cluster.watch([f"127.0.0.1:{port}"])
        async with running(ahead := MemoryStore(), behind := MemoryStore()):
            for instance_id in ("w1", "w2"):
                await ahead.put(instance(instance_id), await ahead.grant(300), takes_over=True)
            async with served(ahead, port):
                await until(lambda: len(views.last or ()) == 2)
            behind.cache.replace(ahead.cache.epoch, 1, {"w1": ahead.cache.entries["w1"]})
            async with served(behind, port):
                await until(lambda: [line["event"] for line in logs].count("registry answers") == 2)
                for instance_id in ("w2", "w3"):
                    await behind.put(instance(instance_id), await behind.grant(300), takes_over=True)
                await until(lambda: len(views.last or ()) == 3)

        assert [sorted(view) for view in views.all] == [["w1", "w2"], ["w1", "w2", "w3"]]

    with capture_logs() as logs:
        run(scenario)


def test_a_registry_that_lost_its_memory_is_believed() -> None:
    async def scenario(cluster: Cluster) -> None:
        port = free_port()
        views = cluster.watch([f"127.0.0.1:{port}"])
        async with running(store := MemoryStore()), served(store, port):
            await store.put(instance(), await store.grant(300), takes_over=True)
            await until(lambda: views.last == {"w1": RECORD})

        async with memory_registry(port):
            await until(lambda: views.last == {})

    run(scenario)


def test_tells_only_what_has_changed_however_many_instances_there_are() -> None:
    """It once copied the view three times for each change."""

    async def scenario(cluster: Cluster) -> None:
        async with running(store := MemoryStore()), served(store) as address:
            store.cache.change(1, {str(number): Entry(instance(str(number)), 0) for number in range(100)})
            views = cluster.watch([address])
            await until(lambda: len(views.last or ()) == 100)

            await store.put(instance(), await store.grant(300), takes_over=True)
            await until(lambda: len(views.last or ()) == 101)
            store.cache.change(3, {}, ["7"])
            await until(lambda: len(views.last or ()) == 100)

            assert views.changes == [100, 1, 1]

    run(scenario)


def test_a_snapshot_tells_what_is_different_from_the_view_before() -> None:
    async def scenario(cluster: Cluster) -> None:
        async with running(store := MemoryStore()), served(store) as address:
            before = {name: Entry(instance(name), 0) for name in ("stays", "moves", "goes")}
            store.cache.change(1, before)
            views = cluster.watch([address])
            await until(lambda: len(views.last or ()) == 3)

            moved = Entry(instance("moves", model="other"), 0)
            store.cache.replace("later", 1, {"stays": before["stays"], "moves": moved})
            await until(lambda: len(views.last or ()) == 2)

            assert views.changes == [3, 2]

    run(scenario)


def test_a_draining_instance_is_marked_in_the_view() -> None:
    async def scenario(cluster: Cluster) -> None:
        async with running(store := MemoryStore()), served(store) as address:
            views = cluster.watch([address])
            await store.put(instance(), await store.grant(300), takes_over=True)

            await store.drain("w1")

            await until(lambda: views.last == {"w1": replace(RECORD, is_draining=True)})

    run(scenario)


def set_first_answer_timeout(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    for module in ("client", "registrar", "watcher"):
        monkeypatch.setattr(f"services.discovery.{module}.FIRST_ANSWER_TIMEOUT_S", seconds)


@pytest.mark.parametrize("order", [1, -1])
def test_a_registry_that_never_answers_is_left_for_the_next(monkeypatch: pytest.MonkeyPatch, order: int) -> None:
    set_first_answer_timeout(monkeypatch, 1.0)

    async def scenario(cluster: Cluster) -> None:
        async with deaf_server() as deaf, memory_registry() as address:
            addresses = [deaf, f"127.0.0.1:{free_port()}", address][::order]

            views = [cluster.watch(addresses) for _ in range(8)]  # Each begins with one of the three, by chance.
            cluster.register(addresses)

            await until(lambda: all(view.last == {"w1": RECORD} for view in views))

    run(scenario)


def test_a_registry_that_freezes_is_noticed_by_its_silence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    quick = {"grpc.keepalive_time_ms": 200, "grpc.keepalive_timeout_ms": 200, "grpc.http2.ping_timeout_ms": 200}
    monkeypatch.setattr(client_module, "CHANNEL_OPTIONS", [*{**dict(CHANNEL_OPTIONS), **quick}.items()])
    set_first_answer_timeout(monkeypatch, 0.2)

    async def scenario(cluster: Cluster) -> None:
        process = started(port := free_port(), tmp_path / "ready")
        try:
            async with running(store := MemoryStore()), served(store) as other:
                addresses = [f"127.0.0.1:{port}", other]
                views = [cluster.watch(addresses) for _ in range(8)]
                await until(lambda: all(view.watcher.is_synced for view in views))

                os.kill(process.pid, signal.SIGSTOP)
                await store.put(instance(), await store.grant(300), takes_over=True)

                await until(lambda: all(view.last == {"w1": RECORD} for view in views))
        finally:
            process.kill()
            process.wait()

    run(scenario)


def test_an_outage_is_logged_seldom_however_often_it_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []

    class Counting(Backoff):
        def delay_s(self, number: int, _: Any) -> float:
            tries.append(number)
            return 0.01

    monkeypatch.setattr(client_module, "BACKOFF", Counting())

    async def scenario(cluster: Cluster) -> None:
        port = free_port()
        cluster.watch([f"127.0.0.1:{port}"])
        await until(lambda: len(tries) > 5)
        async with memory_registry(port):
            await until(lambda: any(line["event"] == "registry answers" for line in logs))

    with capture_logs() as logs:
        run(scenario)

    assert [line["event"] for line in logs][:2] == ["registry not reached yet: trying again", "registry answers"]
    assert tries[:5] == [1, 2, 3, 4, 5]


def test_an_outage_that_lasts_is_spoken_of_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_throttle, "REMIND_S", 0.0)

    async def scenario(cluster: Cluster) -> None:
        port = free_port()
        async with memory_registry(port):
            cluster.watch([f"127.0.0.1:{port}"])
            await until(lambda: said("registry answers"))
        await until(lambda: said("registry lost: keeping the last state"))
        await until(lambda: said("registry still unavailable: trying again"))

    with capture_logs() as logs:

        def said(event: str) -> bool:
            return any(line["event"] == event for line in logs)

        run(scenario)


def test_what_answers_and_is_no_registry_is_told_from_a_registry_that_is_away() -> None:
    async def scenario(cluster: Cluster) -> None:
        async with GrpcServer(["unbroken.v1.Worker"]) as server:
            cluster.watch([await server.start("127.0.0.1:0")])
            await until(lambda: bool(logs))

    with capture_logs() as logs:
        run(scenario)

    assert logs[0]["event"] == "registry not reached yet: trying again"
    assert logs[0]["why"] == "the server at this address is not a registry: check --registry"


def test_a_registry_that_is_slow_to_take_connections_is_reached() -> None:
    """gRPC's own limit on a connection attempt was 50 ms: seen with a server that was only slow."""

    async def scenario(cluster: Cluster) -> None:
        async with memory_registry() as address, (proxy := Proxy(address, delay_s=0.3)).serving() as slow:
            views = cluster.watch([slow])

            await until(lambda: views.last == {})
            assert proxy.accepted_count == 1

    run(scenario)


# Registrar


def test_a_worker_is_told_once_to_drain_however_often_it_registers() -> None:
    async def scenario(cluster: Cluster) -> None:
        port = free_port()
        async with running(store := MemoryStore()):
            async with served(store, port) as address, client(address) as stub:
                cluster.register([address])
                await wait_listed(address)
                await stub.Drain(DrainRequest(instance_id="w1"))
                await until(lambda: cluster.drains)
            async with served(store, port):
                await until(lambda: [line["event"] for line in logs].count("registry answers") == 2)

        assert cluster.drains == ["w1"]

    with capture_logs() as logs:
        run(scenario)


def test_deregistering_without_a_registry_returns_at_once_and_may_be_repeated() -> None:
    async def scenario(cluster: Cluster) -> None:
        registrar = cluster.register([f"127.0.0.1:{free_port()}"])
        await asyncio.sleep(0)

        async with asyncio.timeout(1):
            await registrar.deregister()
            await registrar.deregister()

    run(scenario)


def test_deregistering_before_or_after_the_run_returns_at_once() -> None:
    registrar = Registrar(["127.0.0.1:1"], RECORD, lease_s=10, on_drain=lambda: None)

    run_on_loop(asyncio.wait_for(registrar.deregister(), 1))
    run_on_loop(asyncio.wait_for(registrar.run(), 1))


def test_deregistering_from_a_frozen_registry_is_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("services.discovery.registrar.DEREGISTER_TIMEOUT_S", 0.2)

    async def scenario(cluster: Cluster) -> None:
        port = free_port()
        process = started(port, tmp_path / "ready")
        try:
            registrar = cluster.register([f"127.0.0.1:{port}"])
            await wait_listed(f"127.0.0.1:{port}")
            os.kill(process.pid, signal.SIGSTOP)

            async with asyncio.timeout(2):
                await registrar.deregister()
        finally:
            process.kill()
            process.wait()

    run(scenario)
