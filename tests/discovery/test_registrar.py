"""Registrar keeps a worker registered across outages, reports one drain, and deregisters in bounded time."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from services.discovery.registrar import Registrar
from services.registry.memory_store import MemoryStore
from services.runtime.loop import run_on_loop
from services.stubs.registry_pb2 import DrainRequest
from tests.discovery.support import (
    RECORD,
    Cluster,
    memory_registry,
    run,
    started,
    wait_listed,
)
from tests.registry.support import client, free_port, running, served, until
from tests.support.clock import WAIT_S


def test_worker_is_visible_from_its_registration_to_its_deregistration() -> None:
    async def scenario(cluster: Cluster) -> None:
        async with memory_registry() as address:
            views = cluster.watch([address])
            registrar = cluster.register([address])

            await until(lambda: views.last == {"w1": RECORD})
            await registrar.deregister()

            await until(lambda: views.last == {})

    run(scenario)


def test_worker_registers_again_after_its_registry_lost_its_data(tmp_path: Path) -> None:
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


def test_drain_is_reported_once_even_after_a_reconnect() -> None:
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


def test_deregister_without_a_connection_returns_at_once_and_is_idempotent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.discovery.registrar.DEREGISTER_TIMEOUT_S", 2 * WAIT_S)

    async def scenario(cluster: Cluster) -> None:
        registrar = cluster.register([f"127.0.0.1:{free_port()}"])
        await asyncio.sleep(0)

        async with asyncio.timeout(WAIT_S):
            await registrar.deregister()
            await registrar.deregister()

    run(scenario)


def test_deregister_before_or_after_run_returns_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.discovery.registrar.DEREGISTER_TIMEOUT_S", 2 * WAIT_S)
    registrar = Registrar(["127.0.0.1:1"], RECORD, lease_s=10, on_drain=lambda: None)

    run_on_loop(asyncio.wait_for(registrar.deregister(), WAIT_S))
    run_on_loop(asyncio.wait_for(registrar.run(), WAIT_S))


def test_deregister_from_a_frozen_registry_times_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("services.discovery.registrar.DEREGISTER_TIMEOUT_S", 0.2)

    async def scenario(cluster: Cluster) -> None:
        port = free_port()
        process = started(port, tmp_path / "ready")
        try:
            registrar = cluster.register([f"127.0.0.1:{port}"])
            await wait_listed(f"127.0.0.1:{port}")
            os.kill(process.pid, signal.SIGSTOP)

            async with asyncio.timeout(WAIT_S):
                await registrar.deregister()
        finally:
            process.kill()
            process.wait()

    run(scenario)
