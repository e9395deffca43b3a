"""A client of the registry moves on from registries that do not answer, and logs an outage without repeating itself."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from services.discovery import client as client_module
from services.registry.memory_store import MemoryStore
from services.rpc.status import CHANNEL_OPTIONS
from services.runtime import log_throttle
from services.runtime.backoff import Backoff
from tests.discovery.support import (
    RECORD,
    Cluster,
    deaf_server,
    memory_registry,
    run,
    set_first_answer_timeout,
    started,
)
from tests.http.rpcs import serving_at
from tests.registry.support import Proxy, free_port, instance, running, served, until


@pytest.mark.parametrize("order", [1, -1])
def test_client_moves_on_from_a_registry_that_never_answers(monkeypatch: pytest.MonkeyPatch, order: int) -> None:
    set_first_answer_timeout(monkeypatch, 1.0)

    async def scenario(cluster: Cluster) -> None:
        async with deaf_server() as deaf, memory_registry() as address:
            addresses = [deaf, f"127.0.0.1:{free_port()}", address][::order]

            views = [cluster.watch(addresses) for _ in range(8)]  # Each starts with a random one of the three.
            cluster.register(addresses)

            await until(lambda: all(view.last == {"w1": RECORD} for view in views))

    run(scenario)


def test_client_moves_on_from_a_registry_that_freezes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    quick = {"grpc.keepalive_time_ms": 200, "grpc.keepalive_timeout_ms": 200, "grpc.http2.ping_timeout_ms": 200}
    options = [*{**dict(CHANNEL_OPTIONS), **quick}.items()]
    monkeypatch.setattr("services.rpc.secure.channels.CHANNEL_OPTIONS", options)
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


def test_outage_is_logged_once_across_many_tries(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_lasting_outage_is_logged_again_after_the_reminder_interval(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_server_that_is_not_a_registry_is_reported_as_such() -> None:
    async def scenario(cluster: Cluster) -> None:
        async with serving_at() as address:
            cluster.watch([address])
            await until(lambda: bool(logs))

    with capture_logs() as logs:
        run(scenario)

    assert logs[0]["event"] == "registry not reached yet: trying again"
    assert logs[0]["why"] == "the server at this address is not a registry: check --registry"


def test_client_connects_to_a_registry_that_accepts_slowly() -> None:
    """A bug: gRPC's limit on a connection attempt was 50 ms, which a slow server exceeded."""

    async def scenario(cluster: Cluster) -> None:
        async with memory_registry() as address, (proxy := Proxy(address, delay_s=0.3)).serving() as slow:
            views = cluster.watch([slow])

            await until(lambda: views.last == {})
            assert proxy.accepted_count == 1

    run(scenario)
