"""The set of instances as of a revision, with its latest changes, so that any number of watchers can follow it.

Watchers have no queue: each remembers the revision it has seen and asks for what came after it. What a slow watcher has
missed costs no memory, and more than the history holds comes to it as a snapshot.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile

from services.stubs.registry_pb2 import Instance, WatchResponse

HISTORY_CHANGES_MAX = 10_000
"""How many changes back a watcher can resume: an id and an int each."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An instance and the id of the lease that its record hangs on."""

    instance: Instance
    lease_id: int


class WatchCache:
    """What one store knows. Changed on the event loop by that store alone; `epoch` is empty until it knows anything."""

    def __init__(self, *, history_changes_max: int = HISTORY_CHANGES_MAX) -> None:
        self.epoch = ""
        self.revision = 0
        self._entries: dict[str, Entry] = {}
        self._history: deque[tuple[int, tuple[str, ...]]] = deque()
        self._history_changes_max = history_changes_max
        self._complete_after = 0
        self._changed = asyncio.Event()
        self._listeners: dict[str, set[Callable[[], None]]] = {}
        self._snapshot: WatchResponse | None = None
        self._news: tuple[int, WatchResponse] | None = None  # After which revision, and what.

    @property
    def is_known(self) -> bool:
        return bool(self.epoch)

    def change(self, revision: int, put: Mapping[str, Entry], deleted: Collection[str] = ()) -> None:
        """Go on to `revision`, which is higher than the one before."""
        assert revision > self.revision, "a revision counts up"
        self._entries.update(put)
        for instance_id in deleted:
            self._entries.pop(instance_id, None)
        self._remember(revision, (*put, *deleted))
        self._go_to(revision)
        self._wake((*put, *deleted))

    def replace(self, epoch: str, revision: int, entries: Mapping[str, Entry]) -> None:
        """Begin a new history: whoever watches gets a snapshot."""
        touched = {*self._entries, *entries}
        self.epoch = epoch
        self._go_to(revision)
        self._entries = dict(entries)
        self._history.clear()
        self._complete_after = revision
        self._wake(touched)

    @property
    def entries(self) -> Mapping[str, Entry]:
        return self._entries

    def instances(self) -> list[Instance]:
        """All of them, in the order of their ids."""
        return [self._entries[instance_id].instance for instance_id in sorted(self._entries)]

    def snapshot(self) -> WatchResponse:
        """One message for all who ask at this revision: not to be changed."""
        if self._snapshot is None:
            whole = self.instances()
            self._snapshot = WatchResponse(revision=self.revision, epoch=self.epoch, snapshot=True, put=whole)
        return self._snapshot

    def since(self, revision: int, epoch: str) -> WatchResponse | None:
        """What came after `revision`, as one message; None for nothing, a snapshot where the changes are not known.

        A watcher that is ahead comes from another registry over the same store: nothing is news to it yet. Most have
        seen the same, so they get the same message: not to be changed.
        """
        if epoch != self.epoch or revision < self._complete_after:
            return self.snapshot()
        if revision >= self.revision:
            return None
        if self._news is None or self._news[0] != revision:
            self._news = revision, self._news_after(revision)
        return self._news[1]

    def _news_after(self, revision: int) -> WatchResponse:
        touched = self._touched_after(revision)
        return WatchResponse(
            revision=self.revision,
            epoch=self.epoch,
            put=[self._entries[instance_id].instance for instance_id in touched if instance_id in self._entries],
            deleted=[instance_id for instance_id in touched if instance_id not in self._entries],
        )

    def _touched_after(self, revision: int) -> list[str]:
        """The ids of what changed, sorted. From the latest change on: most watchers have seen all but one."""
        newer = takewhile(lambda change: change[0] > revision, reversed(self._history))
        return sorted({instance_id for _, ids in newer for instance_id in ids})

    async def wait_change(self) -> None:
        """Until the next change. Check `since` first, without an await between."""
        await self._changed.wait()

    async def wait_known(self) -> None:
        """Until the store was reached for the first time."""
        while not self.is_known:
            await self.wait_change()

    @contextmanager
    def listening(self, instance_id: str, listener: Callable[[], None]) -> Iterator[None]:
        """Call `listener` after each change of this one instance."""
        listeners = self._listeners.setdefault(instance_id, set())
        listeners.add(listener)
        try:
            yield
        finally:
            listeners.discard(listener)
            if not listeners and self._listeners.get(instance_id) is listeners:
                del self._listeners[instance_id]

    def _go_to(self, revision: int) -> None:
        self.revision, self._snapshot, self._news = revision, None, None

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
