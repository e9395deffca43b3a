"""WatchCache gives a watcher every change since the revision that it has seen, and keeps nothing per watcher."""

import timeit

import pytest

from services.registry.watch_cache import Entry, WatchCache
from tests.registry.support import instance


def cache_of(*ids: str, history_changes_max: int = 100) -> WatchCache:
    """A cache with one revision per id, in the given order."""
    cache = WatchCache(history_changes_max=history_changes_max)
    cache.replace("epoch", 0, {})
    for number, instance_id in enumerate(ids, 1):
        cache.change(number, {instance_id: Entry(instance(instance_id), number)})
    return cache


def test_since_returns_only_changes_after_the_revision() -> None:
    cache = cache_of("w1", "w2", "w3")

    changes = cache.since(2, "epoch")

    assert changes is not None
    assert not changes.snapshot
    assert [record.instance_id for record in changes.put] == ["w3"]
    assert changes.revision == 3


def test_since_returns_none_if_nothing_has_changed() -> None:
    assert cache_of("w1").since(1, "epoch") is None


def test_several_changes_of_one_instance_are_combined_into_its_last_state() -> None:
    cache = cache_of("w1")
    cache.change(2, {"w1": Entry(instance("w1", model="other"), 1)})
    cache.change(3, {"w2": Entry(instance("w2"), 2)})
    cache.change(4, {}, ["w2"])

    changes = cache.since(1, "epoch")

    assert changes is not None
    assert [(record.instance_id, record.model) for record in changes.put] == [("w1", "other")]
    assert list(changes.deleted) == ["w2"]


def test_removed_instance_is_reported_as_deleted() -> None:
    cache = cache_of("w1", "w2")
    cache.change(3, {}, ["w1"])

    changes = cache.since(2, "epoch")

    assert changes is not None
    assert list(changes.deleted) == ["w1"]
    assert cache.instances() == [instance("w2")]


def test_watcher_that_missed_more_changes_than_the_history_holds_gets_a_snapshot() -> None:
    cache = cache_of("w1", "w2", "w3", history_changes_max=1)

    inside, outside = cache.since(2, "epoch"), cache.since(1, "epoch")

    assert inside is not None
    assert outside is not None
    assert (inside.snapshot, len(inside.put)) == (False, 1)
    assert (outside.snapshot, len(outside.put)) == (True, 3)


def test_watcher_with_another_epoch_gets_a_snapshot() -> None:
    changes = cache_of("w1").since(1, "another")

    assert changes is not None
    assert changes.snapshot
    assert changes.epoch == "epoch"


def test_new_history_is_sent_as_a_snapshot_even_at_a_lower_revision() -> None:
    cache = cache_of("w1", "w2")
    cache.replace("later", 1, {"w3": Entry(instance("w3"), 3)})

    changes = cache.since(2, "epoch")

    assert changes is not None
    assert (changes.snapshot, changes.revision, changes.epoch) == (True, 1, "later")
    assert list(changes.put) == [instance("w3")]


def test_watcher_ahead_of_the_cache_gets_nothing_until_the_cache_has_passed_it() -> None:
    cache = cache_of("w1")

    assert cache.since(2, "epoch") is None
    cache.change(2, {"w2": Entry(instance("w2"), 2)})
    assert cache.since(2, "epoch") is None
    cache.change(3, {"w3": Entry(instance("w3"), 3)})
    assert cache.since(2, "epoch") is not None


def test_cost_of_the_last_change_does_not_depend_on_the_length_of_the_history() -> None:
    """A bug: all 10,000 changes were searched for each watcher and each change, which took 0.45 ms."""

    def cost_s(changes: int) -> float:
        cache = cache_of(*(["w1"] * changes), history_changes_max=changes)
        return min(timeit.repeat(lambda: cache.since(changes - 1, "epoch"), number=20, repeat=5))

    assert cost_s(10_000) < 10 * cost_s(10)


def test_watchers_at_the_same_revision_share_one_message() -> None:
    """A bug: when 100 frontends reconnected together, a snapshot of 10,000 instances was built for each of them."""
    cache = cache_of("w1", "w2")

    assert cache.since(1, "epoch") is cache.since(1, "epoch")
    assert cache.since(0, "another") is cache.since(0, "another")


@pytest.mark.parametrize("change", ["another", "a new history"])
def test_message_is_not_shared_across_a_change(change: str) -> None:
    cache = cache_of("w1", "w2")
    old = [cache.since(1, cache.epoch), cache.since(0, cache.epoch), cache.snapshot()]

    if change == "another":
        cache.change(3, {"w3": Entry(instance("w3"), 3)})
    else:
        cache.replace("epoch", 3, {"w3": Entry(instance("w3"), 3)})

    new = [cache.since(1, cache.epoch), cache.since(0, cache.epoch), cache.snapshot()]
    assert [message is not None and message.revision for message in old] == [2, 2, 2]
    assert [message is not None and message.revision for message in new] == [3, 3, 3]
    assert all(message is not None and "w3" in [one.instance_id for one in message.put] for message in new)


def test_instances_are_sorted_by_id() -> None:
    assert [record.instance_id for record in cache_of("b", "c", "a").instances()] == ["a", "b", "c"]


def test_listener_is_called_only_for_changes_of_its_own_instance() -> None:
    cache = cache_of("w1")
    heard: list[int] = []

    with cache.listening("w2", lambda: heard.append(cache.revision)):
        cache.change(2, {"w1": Entry(instance("w1"), 2)})
        cache.change(3, {"w2": Entry(instance("w2"), 3)})
        cache.change(4, {}, ["w2"])
        cache.replace("later", 1, {"w2": Entry(instance("w2"), 3)})
    cache.change(5, {"w2": Entry(instance("w2"), 3)})

    assert heard == [3, 4, 1]
