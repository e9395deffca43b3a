"""Both stores keep records on leases, and a late registration never replaces its successor."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from services.core.errors import QUOTED_CHARACTERS_MAX, Failure, Reason
from services.registry.etcd_store import EtcdStore
from services.registry.memory_store import MemoryStore
from services.registry.store import LeaseLost, Store
from services.runtime.loop import run_on_loop
from services.stubs.registry_pb2 import INSTANCE_STATE_DRAINING
from tests.registry.support import Etcd, instance, running, until
from tests.support.clock import WAIT_S

Scenario = Callable[[Store], Awaitable[None]]
Run = Callable[[Scenario], None]


@pytest.fixture(params=["memory", pytest.param("etcd", marks=pytest.mark.etcd)])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a scenario on each kind of store."""

    async def on_a_store(scenario: Scenario) -> None:
        store: Store = MemoryStore()
        if request.param == "etcd":
            etcd: Etcd = request.getfixturevalue("etcd")
            store = EtcdStore(etcd.config)
        async with running(store):
            await scenario(store)

    return lambda scenario: run_on_loop(on_a_store(scenario))


def ids(store: Store) -> list[str]:
    return [record.instance_id for record in store.cache.instances()]


def test_put_adds_the_record_to_the_cache(run: Run) -> None:
    async def scenario(store: Store) -> None:
        lease = await store.grant(10)

        stored = await store.put(instance(), lease, takes_over=True)

        await until(lambda: store.cache.revision >= stored.revision)
        assert store.cache.instances() == [instance()] == [stored.instance]
        assert store.cache.entries["w1"].lease_id == lease.lease_id

    run(scenario)


def test_revisions_increase(run: Run) -> None:
    async def scenario(store: Store) -> None:
        lease, other = await store.grant(10), await store.grant(10)

        first = await store.put(instance("w1"), lease, takes_over=True)
        second = await store.put(instance("w2"), other, takes_over=True)

        assert second.revision > first.revision

    run(scenario)


def test_record_expires_with_its_lease_and_stays_while_the_lease_is_renewed(run: Run) -> None:
    async def scenario(store: Store) -> None:
        short, renewed = await store.grant(3), await store.grant(3)
        await store.put(instance("short"), short, takes_over=True)
        await store.put(instance("renewed"), renewed, takes_over=True)
        await until(lambda: len(ids(store)) == 2)

        async with asyncio.timeout(WAIT_S):
            while "short" in ids(store):
                await store.keep_alive(renewed)
                await asyncio.sleep(0.1)

        assert ids(store) == ["renewed"]
        with pytest.raises(LeaseLost):
            await store.keep_alive(short)
        with pytest.raises(LeaseLost):
            await store.put(instance("short"), short, takes_over=True)

    run(scenario)


def test_revoke_removes_the_record_and_is_idempotent(run: Run) -> None:
    async def scenario(store: Store) -> None:
        lease = await store.grant(300)
        await store.put(instance(), lease, takes_over=True)
        await until(lambda: ids(store) == ["w1"])

        await store.revoke(lease)
        await store.revoke(lease)

        await until(lambda: ids(store) == [])

    run(scenario)


def test_record_on_a_new_lease_survives_the_revocation_of_the_old_lease(run: Run) -> None:
    async def scenario(store: Store) -> None:
        old, new = await store.grant(300), await store.grant(300)
        await store.put(instance(), old, takes_over=True)
        taken = await store.put(instance(model="new"), new, takes_over=True)

        await store.revoke(old)

        marker = await store.put(instance("marker"), await store.grant(10), takes_over=True)
        await until(lambda: store.cache.revision >= marker.revision)
        assert store.cache.entries["w1"].instance == taken.instance
        assert store.cache.entries["w1"].lease_id == new.lease_id

    run(scenario)


def test_late_put_does_not_replace_a_record_on_a_newer_lease(run: Run) -> None:
    async def scenario(store: Store) -> None:
        old, new = await store.grant(300), await store.grant(300)
        await store.put(instance(), old, takes_over=True)
        await store.put(instance(), new, takes_over=True)

        with pytest.raises(Failure) as failure:
            await store.put(instance(), old, takes_over=False)

        assert failure.value.reason is Reason.TAKEN_OVER
        await store.put(instance(model="update"), new, takes_over=False)

    run(scenario)


def test_drain_marks_the_record_and_keeps_its_lease(run: Run) -> None:
    async def scenario(store: Store) -> None:
        lease = await store.grant(300)
        await store.put(instance(), lease, takes_over=True)

        marked = await store.drain("w1")
        again = await store.drain("w1")

        assert marked == again == instance(state=INSTANCE_STATE_DRAINING)
        await until(lambda: store.cache.instances() == [marked])
        assert store.cache.entries["w1"].lease_id == lease.lease_id

    run(scenario)


def test_put_does_not_undo_a_drain(run: Run) -> None:
    async def scenario(store: Store) -> None:
        old, new = await store.grant(300), await store.grant(300)
        await store.put(instance(), old, takes_over=True)
        await store.drain("w1")

        stored = await store.put(instance(model="new"), new, takes_over=True)

        assert stored.instance == instance(model="new", state=INSTANCE_STATE_DRAINING)

    run(scenario)


def test_drain_of_an_unknown_instance_fails_with_instance_not_found(run: Run) -> None:
    async def scenario(store: Store) -> None:
        with pytest.raises(Failure) as failure:
            await store.drain("w" * 1000)

        assert failure.value.reason is Reason.INSTANCE_NOT_FOUND
        assert len(failure.value.detail) < QUOTED_CHARACTERS_MAX + 50

    run(scenario)
