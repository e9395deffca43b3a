"""The set of instances at a revision, with its latest changes, for any number of watchers.

Watchers have no queue: each remembers the last revision it has seen and asks for later changes. A slow watcher
therefore costs no memory. If it has missed more changes than the history holds, it gets a snapshot.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile

from services.stubs.registry_pb2 import Instance, WatchResponse

HISTORY_CHANGES_MAX = 10_000
"""How many changes back a watcher can resume. Each change takes an id and an int."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An instance, and the id of the lease that its record is on."""

    instance: Instance
    lease_id: int


class WatchCache:
    """The instances that one store knows. Only that store changes it, on the event loop.

    `epoch` is empty until the store has been reached for the first time.
    """

    def __init__(self, *, history_changes_max: int = HISTORY_CHANGES_MAX) -> None:
        self.epoch = ""
        self.revision = 0
        self._entries: dict[str, Entry] = {}
        self._history: deque[tuple[int, tuple[str, ...]]] = deque()
        self._history_changes_max = history_changes_max
        self._complete_after = 0
        self._changed = asyncio.Event()
        self._listeners: dict[str, dict[Callable[[], None], None]] = {}
        self._snapshot: WatchResponse | None = None
        self._latest: tuple[int, WatchResponse] | None = None  # The last result of `since`, and its revision.

    @property
    def is_known(self) -> bool:
        """Whether the store has ever been reached."""
        return bool(self.epoch)

    def change(self, revision: int, put: Mapping[str, Entry], deleted: Collection[str] = ()) -> None:
        """Apply changes and advance to `revision`."""
        assert revision > self.revision, "revisions increase"
        self._entries.update(put)
        for instance_id in deleted:
            self._entries.pop(instance_id, None)
        self._remember(revision, (*put, *deleted))
        self._set_revision(revision)
        self._wake((*put, *deleted))

    def replace(self, epoch: str, revision: int, entries: Mapping[str, Entry]) -> None:
        """Begin a new history. Every watcher gets a snapshot."""
        touched = {*self._entries, *entries}
        self.epoch = epoch
        self._set_revision(revision)
        self._entries = dict(entries)
        self._history.clear()
        self._complete_after = revision
        self._wake(touched)

    @property
    def entries(self) -> Mapping[str, Entry]:
        return self._entries

    def instances(self) -> list[Instance]:
        """All instances, sorted by id."""
        return [self._entries[instance_id].instance for instance_id in sorted(self._entries)]

    def snapshot(self) -> WatchResponse:
        """All instances as one message. Callers share the message and must not modify it."""
        if self._snapshot is None:
            put = self.instances()
            self._snapshot = WatchResponse(revision=self.revision, epoch=self.epoch, snapshot=True, put=put)
        return self._snapshot

    def since(self, revision: int, epoch: str) -> WatchResponse | None:
        """The changes after `revision` as one message: None if there are none, a snapshot if they are not known.

        A watcher that is ahead of the cache comes from another registry on the same store, and gets None. Callers share
        the message and must not modify it: most watchers have seen the same revision.
        """
        if epoch != self.epoch or revision < self._complete_after:
            return self.snapshot()
        if revision >= self.revision:
            return None
        if self._latest is None or self._latest[0] != revision:
            self._latest = revision, self._changes_after(revision)
        return self._latest[1]

    def _changes_after(self, revision: int) -> WatchResponse:
        touched = self._touched_after(revision)
        return WatchResponse(
            revision=self.revision,
            epoch=self.epoch,
            put=[self._entries[instance_id].instance for instance_id in touched if instance_id in self._entries],
            deleted=[instance_id for instance_id in touched if instance_id not in self._entries],
        )

    def _touched_after(self, revision: int) -> list[str]:
        """The ids of changed instances, sorted. Searches backwards: most watchers lack only the latest change."""
        newer = takewhile(lambda change: change[0] > revision, reversed(self._history))
        return sorted({instance_id for _, ids in newer for instance_id in ids})

    async def wait_change(self) -> None:
        """Wait for the next change. Call `since` first, without an await in between."""
        await self._changed.wait()

    async def wait_known(self) -> None:
        """Wait until the store has been reached for the first time."""
        while not self.is_known:
            await self.wait_change()

    @contextmanager
    def listening(self, instance_id: str, listener: Callable[[], None]) -> Iterator[None]:
        """Call `listener` after each change of this instance."""
        listeners = self._listeners.setdefault(instance_id, {})
        listeners[listener] = None
        try:
            yield
        finally:
            listeners.pop(listener, None)
            if not listeners and self._listeners.get(instance_id) is listeners:
                del self._listeners[instance_id]

    def _set_revision(self, revision: int) -> None:
        self.revision, self._snapshot, self._latest = revision, None, None

    def _remember(self, revision: int, touched: tuple[str, ...]) -> None:
        self._history.append((revision, touched))
        while len(self._history) > self._history_changes_max:
            self._complete_after, _ = self._history.popleft()

    def _wake(self, touched: Collection[str]) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        for instance_id in touched:
            for listener in tuple(self._listeners.get(instance_id, ())):
                listener()
