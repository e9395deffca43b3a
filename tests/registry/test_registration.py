"""Registration: a record stays in the store for as long as its stream lives, whatever the store does meanwhile."""

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
    """The other end of a Register stream: what it was told."""

    def __init__(self) -> None:
        self.told: list[RegisterResponse] = []

    async def tell(self, response: RegisterResponse) -> None:
        self.told.append(response)


@asynccontextmanager
async def kept(registration: Registration) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        keeping = group.create_task(registration.run())
        yield
        keeping.cancel()


def lease_of(store: MemoryStore) -> Lease:
    return Lease(store.cache.entries["w1"].lease_id, 10)


def test_confirms_the_record_with_its_lease_and_revision() -> None:
    async def scenario() -> None:
        store, client = MemoryStore(), Client()

        async with kept(Registration(store, instance(), 10, client.tell)):
            await until(lambda: client.told)

        assert client.told[0].instance == instance()
        assert client.told[0].lease.ToSeconds() == 10
        assert client.told[0].revision == store.cache.revision == 1

    run_on_loop(scenario())


def test_an_update_replaces_the_record_and_is_confirmed() -> None:
    async def scenario() -> None:
        store, client = MemoryStore(), Client()
        registration = Registration(store, instance(), 10, client.tell)

        async with kept(registration):
            await until(lambda: client.told)
            registration.update(instance(model="other"))
            await until(lambda: len(client.told) == 2)

        assert store.cache.instances() == [instance(model="other")] == [client.told[1].instance]

    run_on_loop(scenario())


def test_an_update_keeps_the_instance_id() -> None:
    registration = Registration(MemoryStore(), instance("w1"), 10, Client().tell)

    with pytest.raises(Failure) as failure:
        registration.update(instance("w2"))

    assert failure.value.reason is Reason.INVALID_ARGUMENT


def test_the_lease_is_renewed() -> None:
    async def scenario() -> None:
        store, client = MemoryStore(), Client()

        async with kept(Registration(store, instance(), 1, client.tell)):
            await until(lambda: client.told)
            await asyncio.sleep(1.2)  # longer than the lease: nothing else shows that it was renewed

            assert store.cache.revision == 1
            assert store.cache.instances() == [instance()]

    run_on_loop(scenario())


def test_a_lost_lease_is_granted_anew_and_the_record_put_again() -> None:
    async def scenario() -> None:
        store, client = MemoryStore(), Client()

        async with kept(Registration(store, instance(), 10, client.tell)):
            await until(lambda: client.told)
            await store.revoke(lease_of(store))
            await until(lambda: len(client.told) == 2)

        assert store.cache.instances() == [instance()]

    run_on_loop(scenario())


def test_the_client_is_told_to_drain() -> None:
    async def scenario() -> None:
        store, client = MemoryStore(), Client()

        async with kept(Registration(store, instance(), 10, client.tell)):
            await until(lambda: client.told)
            await store.drain("w1")
            await until(lambda: len(client.told) == 2)

        assert client.told[1].instance.state == INSTANCE_STATE_DRAINING

    run_on_loop(scenario())


def test_ends_when_another_took_the_record_over() -> None:
    async def scenario() -> None:
        store, client = MemoryStore(), Client()
        registration = Registration(store, instance(), 10, client.tell)

        async def take_over() -> None:
            async with kept(registration):
                await until(lambda: client.told)
                await store.put(instance(model="new"), await store.grant(10), takes_over=True)
                await asyncio.Event().wait()

        with pytest.raises(ExceptionGroup) as failures:
            await take_over()

        assert failures.group_contains(Failure, match=Reason.TAKEN_OVER)
        await registration.remove()
        assert store.cache.instances() == [instance(model="new")]

    run_on_loop(scenario())


def test_a_view_that_is_behind_is_not_taken_for_a_loss_or_a_take_over() -> None:
    """As with an etcd that lost its data: the record is back at a low revision while the view still is what it was."""

    async def scenario() -> None:
        store, client = MemoryStore(), Client()

        async with kept(Registration(store, instance(), 10, client.tell)):
            await until(lambda: client.told)
            first = store.cache.entries["w1"]
            await store.revoke(lease_of(store))
            await until(lambda: len(client.told) == 2)
            second = store.cache.entries["w1"]

            store.cache.replace(store.cache.epoch, 99, {"w1": first})
            await settle()
            store.cache.replace(store.cache.epoch, 1, {})
            await settle()
            store.cache.replace(store.cache.epoch, 100, {"w1": second})
            await store.drain("w1")
            await until(lambda: len(client.told) == 3)

        assert client.told[2].instance.state == INSTANCE_STATE_DRAINING
        assert store.cache.revision == 101

    run_on_loop(scenario())


async def settle() -> None:
    """Let the registration see what is in the view."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_lingering_begins_the_lease_again() -> None:
    async def scenario() -> None:
        store, client = MemoryStore(), Client()
        registration = Registration(store, instance(), 2, client.tell)
        async with kept(registration):
            await until(lambda: client.told)
            stored_at = asyncio.get_running_loop().time()
        await asyncio.sleep(0.3)

        await registration.linger()

        await until(lambda: not store.cache.entries)
        assert asyncio.get_running_loop().time() - stored_at >= 2.3

    run_on_loop(scenario())


def test_a_client_that_does_not_read_is_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration_module, "SEND_TIMEOUT_S", 0.05)

    async def never(_: RegisterResponse) -> None:
        await asyncio.Event().wait()

    with pytest.raises(Failure) as failure:
        run_on_loop(Registration(MemoryStore(), instance(), 10, never).run())

    assert failure.value.reason is Reason.SLOW_CLIENT
