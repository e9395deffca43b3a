"""MemoryStore: each start is a history of its own."""

from services.registry.memory_store import MemoryStore


def test_a_restart_is_another_epoch_so_that_watchers_get_a_snapshot() -> None:
    assert MemoryStore().cache.epoch != MemoryStore().cache.epoch
