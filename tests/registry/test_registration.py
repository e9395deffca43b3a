"""Registration keeps its record in the store while its stream is open, across losses of the lease and of the store."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.core.errors import Failure, Reason
from services.registry import registration as registration_module
from services.registry.memory_store import MemoryStore
from services.registry.registration import Registration
from services.registry.store import Lease
from services.runtime.loop import run_on_loop
from services.stubs.registry_pb2 import INSTANCE_STATE_DRAINING, RegisterResponse
from tests.registry.support import instance, until


class Client:
    """The client of a Register stream: records the responses."""

    def __init__(self) -> None:
        self.received: list[RegisterResponse] = []

    async def send(self, response: RegisterResponse) -> None:
        self.received.append(response)


@asynccontextmanager
async def kept(registration: Registration) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        keeping = group.create_task(registration.run())
        yield
        keeping.cancel()


def lease_of(store: MemoryStore) -> Lease:
    return Lease(store.cache.entries["w1"].lease_id, 10)


def test_registration_is_confirmed_with_its_lease_and_revision() -> None:
    async def scenario() -> None:
        store, client = MemoryStore(), Client()

        async with kept(Registration(store, instance(), 10, client.send)):
            await until(lambda: client.received)

        assert client.received[0].instance == instance()
        assert client.received[0].lease.ToSeconds() == 10
        assert client.received[0].revision == store.cache.revision == 1

    run_on_loop(scenario())


def test_update_replaces_the_record_and_is_confirmed() -> None:
    async def scenario() -> None:
        store, client = MemoryStore(), Client()
        registration = Registration(store, instance(), 10, client.send)

        async with kept(registration):
            await until(lambda: client.received)
            registration.update(instance(model="other"))
            await until(lambda: len(client.received) == 2)

        assert store.cache.instances() == [instance(model="other")] == [client.received[1].instance]

    run_on_loop(scenario())


def test_update_with_another_instance_id_is_refused() -> None:
    registration = Registration(MemoryStore(), instance("w1"), 10, Client().send)

    with pytest.raises(Failure) as failure:
        registration.update(instance("w2"))

    assert failure.value.reason is Reason.INVALID_ARGUMENT


def test_lease_is_renewed_while_the_registration_runs() -> None:
    async def scenario() -> None:
        store, client = MemoryStore(), Client()

        async with kept(Registration(store, instance(), 3, client.send)):
            await until(lambda: client.received)
            await asyncio.sleep(3.3)  # longer than the lease: nothing else shows that it was renewed

            assert store.cache.revision == 1
            assert store.cache.instances() == [instance()]

    run_on_loop(scenario())


def test_record_is_put_on_a_new_lease_after_its_lease_is_lost() -> None:
    async def scenario() -> None:
        store, client = MemoryStore(), Client()

        async with kept(Registration(store, instance(), 10, client.send)):
            await until(lambda: client.received)
            await store.revoke(lease_of(store))
            await until(lambda: len(client.received) == 2)

        assert store.cache.instances() == [instance()]

    run_on_loop(scenario())


def test_drain_is_sent_to_the_client() -> None:
    async def scenario() -> None:
        store, client = MemoryStore(), Client()

        async with kept(Registration(store, instance(), 10, client.send)):
            await until(lambda: client.received)
            await store.drain("w1")
            await until(lambda: len(client.received) == 2)

        assert client.received[1].instance.state == INSTANCE_STATE_DRAINING

    run_on_loop(scenario())


def test_registration_ends_when_another_stream_takes_its_record_over() -> None:
    async def scenario() -> None:
        store, client = MemoryStore(), Client()
        registration = Registration(store, instance(), 10, client.send)

        async def take_over() -> None:
            async with kept(registration):
                await until(lambda: client.received)
                await store.put(instance(model="new"), await store.grant(10), takes_over=True)
                await asyncio.Event().wait()

        with pytest.raises(ExceptionGroup) as failures:
            await take_over()

        assert failures.group_contains(Failure, match=Reason.TAKEN_OVER)
        await registration.remove()
        assert store.cache.instances() == [instance(model="new")]

    run_on_loop(scenario())


def test_cache_that_is_behind_is_not_mistaken_for_a_loss_or_a_takeover() -> None:
    """After etcd has lost its data, the record is back at a low revision while the cache still has the old state."""

    async def scenario() -> None:
        store, client = MemoryStore(), Client()

        async with kept(Registration(store, instance(), 10, client.send)):
            await until(lambda: client.received)
            first = store.cache.entries["w1"]
            await store.revoke(lease_of(store))
            await until(lambda: len(client.received) == 2)
            second = store.cache.entries["w1"]

            store.cache.replace(store.cache.epoch, 99, {"w1": first})
            await settle()
            store.cache.replace(store.cache.epoch, 1, {})
            await settle()
            store.cache.replace(store.cache.epoch, 100, {"w1": second})
            await store.drain("w1")
            await until(lambda: len(client.received) == 3)

        assert client.received[2].instance.state == INSTANCE_STATE_DRAINING
        assert store.cache.revision == 101

    run_on_loop(scenario())


async def settle() -> None:
    """Let the registration see the state of the cache."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_linger_renews_the_lease() -> None:
    async def scenario() -> None:
        store, client = MemoryStore(), Client()
        registration = Registration(store, instance(), 2, client.send)
        async with kept(registration):
            await until(lambda: client.received)
            stored_at = asyncio.get_running_loop().time()
        await asyncio.sleep(0.3)

        await registration.linger()

        await until(lambda: not store.cache.entries)
        assert asyncio.get_running_loop().time() - stored_at >= 2.3

    run_on_loop(scenario())


def test_registration_of_a_client_that_does_not_read_ends_with_slow_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration_module, "SEND_TIMEOUT_S", 0.05)

    async def never(_: RegisterResponse) -> None:
        await asyncio.Event().wait()

    with pytest.raises(Failure) as failure:
        run_on_loop(Registration(MemoryStore(), instance(), 10, never).run())

    assert failure.value.reason is Reason.SLOW_CLIENT
