"""MemoryStore begins a new history at each start. See test_store.py for what all stores have in common."""

from services.registry.memory_store import MemoryStore


def test_each_start_begins_a_new_epoch_so_that_watchers_get_a_snapshot() -> None:
    assert MemoryStore().cache.epoch != MemoryStore().cache.epoch
