"""The workers of one model, which of them a request looks at, and the requests that wait for room on one.

Workers are left out by the last column of the table in `state.py`. So a request costs the same however many workers are
full or busy.
"""

from collections.abc import Iterable, Iterator, Sequence

from services.core.model_card import ModelCard
from services.frontend.routing.candidate import Candidate
from services.frontend.routing.thresholds import Thresholds
from services.frontend.routing.wait_queue import WaitQueue


class WorkerSet:
    """A worker is in `open`, in `busy`, or left out. A change of one worker costs the same for any number of workers.

    `version`: changes when a worker is added or removed.
    """

    def __init__(self, card: ModelCard, wait_queue: WaitQueue | None = None) -> None:
        self.card = card
        self.wait_queue = wait_queue or WaitQueue()
        self.version = 0
        self._all: dict[str, Candidate] = {}
        self._open = _IndexedList()
        self._busy = _IndexedList()
        self._busy_by = Thresholds()  # Used only while a worker is busy, as `_busy_until` is.
        self._busy_until = 0.0

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self._all.values())

    def __len__(self) -> int:
        return len(self._all)

    @property
    def open(self) -> Sequence[Candidate]:
        """The workers that every request looks at, in no order. The list changes with the worker set."""
        return self._open.items

    @property
    def busy(self) -> Sequence[Candidate]:
        """Busy workers: only requests that lost their worker look at them. The list changes with the worker set."""
        return self._busy.items

    def add(self, worker: Candidate) -> None:
        self._all[worker.key] = worker
        self.version += 1
        self.on_change(worker)

    def remove(self, worker: Candidate) -> None:
        """Remove a worker, which must be present."""
        del self._all[worker.key]
        self.version += 1
        self.leave_out(worker)

    def on_change(self, worker: Candidate) -> None:
        """The worker may have room again: open it and wake a waiting request. Ignored if the worker was removed."""
        if worker.key in self._all:
            self._busy.discard(worker)
            self._open.add(worker)
            self.wait_queue.wake_first()

    def leave_out(self, worker: Candidate) -> None:
        """Leave the worker out until it changes: no request looks at it. Idempotent."""
        self._open.discard(worker)
        self._busy.discard(worker)

    def set_busy(self, workers: Iterable[Candidate], thresholds: Thresholds, until: float) -> None:
        """Count open workers as busy without looking again.

        `until`: in event-loop time; the time given with the first of them counts for all.
        """
        if not self.busy:
            self._busy_by, self._busy_until = thresholds, until
        for worker in workers:
            self._open.discard(worker)
            self._busy.add(worker)

    def expire_busy(self, thresholds: Thresholds | None, now: float) -> None:
        """Open busy workers again if their time is over, or if they were found busy by other thresholds than these."""
        if not self.busy or (self._busy_by == thresholds and now < self._busy_until):
            return
        for worker in list(self.busy):
            self._busy.discard(worker)
            self._open.add(worker)


class _IndexedList:
    """Candidates in no order. Adding, discarding and drawing by position take constant time."""

    def __init__(self) -> None:
        self.items: list[Candidate] = []
        self._positions: dict[str, int] = {}

    def add(self, worker: Candidate) -> None:
        """Idempotent, as `discard` is."""
        if worker.key not in self._positions:
            self._positions[worker.key] = len(self.items)
            self.items.append(worker)

    def discard(self, worker: Candidate) -> None:
        position = self._positions.pop(worker.key, None)
        if position is None:
            return
        last = self.items.pop()  # Moves to the position that is free now.
        if last is not worker:
            self.items[position] = last
            self._positions[last.key] = position
