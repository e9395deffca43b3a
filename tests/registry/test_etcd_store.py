"""EtcdStore keeps registries on the same etcd in agreement, and keeps its cache while etcd is unavailable."""

import asyncio
import shutil
from pathlib import Path

import pytest
from etcd3aio import Etcd3Client

from services.core.errors import Failure, Reason
from services.registry.config import EtcdConfig
from services.registry.etcd_store import EtcdStore
from services.registry.registration import Registration
from services.runtime.loop import run_on_loop
from services.stubs.registry_pb2 import INSTANCE_STATE_DRAINING, RegisterResponse
from tests.registry.support import Etcd, Proxy, compact, ids, instance, put, running, until, until_stored
from tests.support.clock import WAIT_S

pytestmark = pytest.mark.etcd


async def ignore(_: RegisterResponse) -> None:
    """The client of a registration, which ignores the responses."""


def test_two_registries_on_one_etcd_have_the_same_instances_epoch_and_revision(etcd: Etcd) -> None:
    async def scenario() -> None:
        one, two = EtcdStore(etcd.config), EtcdStore(etcd.config)
        async with running(one, two):
            await put(one, "w1")
            await put(two, "w2")
            await until(lambda: ids(one) == ids(two) == ["w1", "w2"])

            assert one.cache.epoch == two.cache.epoch
            assert one.cache.revision == two.cache.revision

    run_on_loop(scenario())


def test_store_waits_for_an_etcd_that_is_down_at_the_start(tmp_path: Path) -> None:
    etcd = Etcd(tmp_path)

    async def scenario() -> None:
        store = EtcdStore(etcd.config)
        async with asyncio.TaskGroup() as group:
            following = group.create_task(store.run())
            with pytest.raises(Failure) as failure:
                await store.grant(10)
            assert failure.value.reason is Reason.STORE_AWAY
            assert not store.cache.is_known

            etcd.start()

            await until(lambda: store.cache.is_known)
            following.cancel()

    try:
        run_on_loop(scenario())
    finally:
        etcd.kill()


def test_cache_stays_while_etcd_is_down_and_follows_it_after_a_restart(etcd: Etcd) -> None:
    async def scenario() -> None:
        store = EtcdStore(etcd.config)
        async with running(store):
            await put(store, "w1")
            await until(lambda: ids(store) == ["w1"])
            epoch = store.cache.epoch

            etcd.kill()
            with pytest.raises(Failure):
                await store.drain("w1")
            assert ids(store) == ["w1"]
            etcd.start()

            await until_stored(store, "w2")
            await until(lambda: ids(store) == ["w1", "w2"])
            assert store.cache.epoch == epoch

    run_on_loop(scenario())


def test_loss_of_etcds_data_begins_a_new_epoch_with_the_open_registrations(etcd: Etcd) -> None:
    async def scenario() -> None:
        store = EtcdStore(etcd.config)
        async with running(store), asyncio.TaskGroup() as group:
            for number in range(5):
                await put(store, f"old{number}")
            open_one = group.create_task(Registration(store, instance("open"), 1, ignore).run())
            await until(lambda: len(ids(store)) == 6)
            epoch, revision = store.cache.epoch, store.cache.revision

            etcd.kill()
            etcd.wipe()
            etcd.start()

            await until(lambda: ids(store) == ["open"])
            changes = store.cache.since(revision, epoch)
            assert changes is not None
            assert changes.snapshot
            assert store.cache.revision < revision
            open_one.cancel()

    run_on_loop(scenario())


def test_restore_of_etcd_from_a_backup_begins_a_new_epoch(etcd: Etcd, tmp_path: Path) -> None:
    async def scenario() -> None:
        store = EtcdStore(etcd.config)
        async with running(store):
            await put(store, "before")
            await until(lambda: ids(store) == ["before"])
            epoch = store.cache.epoch
            etcd.kill()
            shutil.copytree(etcd.data, tmp_path / "backup")
            etcd.start()
            await until_stored(store, "after")
            await until(lambda: ids(store) == ["after", "before"])

            etcd.kill()
            etcd.wipe()
            shutil.copytree(tmp_path / "backup", etcd.data)
            etcd.start()

            await until(lambda: ids(store) == ["before"])
            assert store.cache.epoch != epoch

    run_on_loop(scenario())


def test_registration_recovers_from_an_outage_longer_than_its_lease(etcd: Etcd) -> None:
    async def scenario() -> None:
        proxy = Proxy(etcd.endpoint)
        near, far = EtcdStore(EtcdConfig(endpoints=(proxy.endpoint,))), EtcdStore(etcd.config)
        async with proxy.serving(), running(near, far), asyncio.TaskGroup() as group:
            keeping = group.create_task(Registration(near, instance(), 1, ignore).run())
            await until(lambda: ids(near) == ids(far) == ["w1"])

            proxy.cut()
            await until(lambda: ids(far) == [])
            assert ids(near) == ["w1"]
            proxy.mend()

            await until(lambda: ids(far) == ids(near) == ["w1"])
            keeping.cancel()

    run_on_loop(scenario())


def test_registration_that_reconnects_late_does_not_replace_its_successor(etcd: Etcd) -> None:
    async def scenario() -> None:
        proxy = Proxy(etcd.endpoint)
        near, far = EtcdStore(EtcdConfig(endpoints=(proxy.endpoint,))), EtcdStore(etcd.config)
        async with proxy.serving(), running(near, far), asyncio.TaskGroup() as group:
            ended = group.create_task(reason_of_end(Registration(near, instance(), 1, ignore)))
            await until(lambda: ids(far) == ["w1"])

            proxy.cut()
            await until(lambda: ids(far) == [])
            await far.put(instance(model="follower"), await far.grant(300), takes_over=True)
            proxy.mend()

            async with asyncio.timeout(WAIT_S):
                assert await ended is Reason.TAKEN_OVER
            await until(lambda: near.cache.instances() == [instance(model="follower")] == far.cache.instances())

    run_on_loop(scenario())


async def reason_of_end(registration: Registration) -> Reason:
    with pytest.raises(Failure) as failure:
        await registration.run()
    return failure.value.reason


def test_changes_that_were_compacted_during_an_outage_are_not_missed(etcd: Etcd) -> None:
    async def scenario() -> None:
        proxy = Proxy(etcd.endpoint)
        near, far = EtcdStore(EtcdConfig(endpoints=(proxy.endpoint,))), EtcdStore(etcd.config)
        async with proxy.serving(), running(near, far):
            lease = await far.grant(300)
            await far.put(instance("goes"), lease, takes_over=True)
            await put(far, "stays")
            await until(lambda: ids(near) == ["goes", "stays"])
            seen, epoch = near.cache.revision, near.cache.epoch

            proxy.cut()
            await far.revoke(lease)
            await put(far, "comes")
            await until(lambda: ids(far) == ["comes", "stays"])
            await compact(etcd, far.cache.revision)
            proxy.mend()

            await until(lambda: ids(near) == ["comes", "stays"])
            changes = near.cache.since(seen, epoch)
            assert changes is not None
            assert (changes.snapshot, list(changes.put), list(changes.deleted)) == (
                False,
                [instance("comes")],
                ["goes"],
            )

    run_on_loop(scenario())


def test_value_that_is_not_an_instance_is_ignored(etcd: Etcd) -> None:
    async def scenario() -> None:
        store = EtcdStore(etcd.config)
        async with running(store), Etcd3Client([etcd.endpoint]) as client:
            await put(store, "w1")
            assert client.kv is not None
            await client.kv.put("/unbroken/v1/instances/junk", b"\xff\xff\xff", timeout=WAIT_S)
            await client.kv.put("/unbroken/v1/other", b"?", timeout=WAIT_S)
            await put(store, "w2")

            await until(lambda: ids(store) == ["w1", "w2"])

    run_on_loop(scenario())


def test_concurrent_writes_of_one_record_all_take_effect(etcd: Etcd) -> None:
    async def scenario() -> None:
        stores = [EtcdStore(etcd.config) for _ in range(2)]
        async with running(*stores):
            lease = await stores[0].grant(300)
            await stores[0].put(instance(), lease, takes_over=True)

            async with asyncio.TaskGroup() as group:
                group.create_task(stores[0].put(instance(model="new"), lease, takes_over=False))
                group.create_task(stores[1].drain("w1"))

            both = instance(model="new", state=INSTANCE_STATE_DRAINING)
            await until(lambda: stores[0].cache.instances() == stores[1].cache.instances() == [both])

    run_on_loop(scenario())
