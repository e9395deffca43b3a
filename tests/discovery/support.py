"""Shared by the tests of discovery: registrars, watchers and registries of several kinds."""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from services.discovery.client import InstanceRecord
from services.discovery.registrar import Registrar
from services.discovery.watcher import Watcher
from services.registry.memory_store import MemoryStore
from services.runtime.loop import run_on_loop
from services.stubs.registry_pb2 import ListRequest
from tests.registry.support import client, running, served
from tests.support.clock import WAIT_S
from tests.support.raw_session import serve_connections

RECORD = InstanceRecord("w1", "127.0.0.1:9000", "mocker")


class Cluster:
    """Runs registrars and watchers until the scenario ends."""

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
    """Records the reports of a watcher. changes: number of changed records per report. all: the resulting sets."""

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
    """A server that accepts connections and never sends anything."""

    async def never_answer(_: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    async with serve_connections(never_answer) as address:
        yield address


async def wait_listed(address: str) -> None:
    """Wait until the registry at `address` lists an instance."""
    async with client(address) as stub, asyncio.timeout(WAIT_S):
        while not (await stub.List(ListRequest())).instances:
            await asyncio.sleep(0.01)


def lost(logs: Sequence[Mapping[str, Any]], what: str) -> bool:
    return any(line["event"].startswith("registry lost") and line["what"] == what for line in logs)


def started(port: int, ready: Path) -> subprocess.Popen[bytes]:
    """Start a registry process, and wait until it listens."""
    ready.unlink(missing_ok=True)
    options = ("--listen", f"127.0.0.1:{port}", "--ready-file", str(ready))
    process = subprocess.Popen([sys.executable, "-m", "services", "registry", *options])
    give_up_at = time.monotonic() + WAIT_S
    while not ready.exists():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)
    return process


def set_first_answer_timeout(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    for module in ("client", "registrar", "watcher"):
        monkeypatch.setattr(f"services.discovery.{module}.FIRST_ANSWER_TIMEOUT_S", seconds)
