"""Watcher keeps the set of instances, reports each difference once, and keeps the last set during an outage."""

from dataclasses import replace

from structlog.testing import capture_logs

from services.registry.memory_store import MemoryStore
from services.registry.watch_cache import Entry
from tests.discovery.support import RECORD, Cluster, lost, memory_registry, run
from tests.registry.support import free_port, instance, running, served, until


def test_watcher_is_synced_by_the_first_answer_and_keeps_its_set_during_an_outage() -> None:
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


def test_reconnect_without_changes_is_not_reported_and_a_registry_that_is_behind_undoes_nothing() -> None:
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


def test_set_of_a_registry_that_lost_its_data_replaces_the_old_set() -> None:
    async def scenario(cluster: Cluster) -> None:
        port = free_port()
        views = cluster.watch([f"127.0.0.1:{port}"])
        async with running(store := MemoryStore()), served(store, port):
            await store.put(instance(), await store.grant(300), takes_over=True)
            await until(lambda: views.last == {"w1": RECORD})

        async with memory_registry(port):
            await until(lambda: views.last == {})

    run(scenario)


def test_only_changed_instances_are_reported() -> None:
    """A bug: the whole set was copied three times for each change."""

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


def test_snapshot_is_reported_as_its_difference_from_the_old_set() -> None:
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


def test_draining_instance_is_marked() -> None:
    async def scenario(cluster: Cluster) -> None:
        async with running(store := MemoryStore()), served(store) as address:
            views = cluster.watch([address])
            await store.put(instance(), await store.grant(300), takes_over=True)

            await store.drain("w1")

            await until(lambda: views.last == {"w1": replace(RECORD, is_draining=True)})

    run(scenario)
