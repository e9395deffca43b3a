"""The sessions to workers of one model, which of them are worth a look, and who waits for room on one.

| session | is worth a look |
| --- | --- |
| open | to every request |
| closed: found without room for a single request, or leaving | not before there is news of it |
| busy: found over a threshold | not before that is doubted; but to requests that are under way |

So a look costs the same however many workers are full or busy.
"""

from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from services.core.model_card import ModelCard
from services.frontend.routing.thresholds import Thresholds
from services.frontend.routing.wait_queue import WaitQueue


class Keyed(Protocol):
    """A session."""

    @property
    def key(self) -> str: ...


Session = TypeVar("Session", bound=Keyed)


class WorkerSet(Generic[Session]):
    """A change of one costs the same, however many there are."""

    def __init__(self, card: ModelCard, line: WaitQueue | None = None) -> None:
        self.card = card
        self.line = line or WaitQueue()
        self.changes_count = 0  # Of who is there.
        self._all: dict[str, Session] = {}
        self._open: _Shelf[Session] = _Shelf()
        self._busy: _Shelf[Session] = _Shelf()
        self._belief = Thresholds(), 0.0  # By which, and until when.

    def __iter__(self) -> Iterator[Session]:
        return iter(self._all.values())

    def __len__(self) -> int:
        return len(self._all)

    @property
    def open(self) -> Sequence[Session]:
        """In no order. A view: it changes with the roster, as `busy` does."""
        return self._open.items

    @property
    def busy(self) -> Sequence[Session]:
        return self._busy.items

    def add(self, session: Session) -> None:
        """A new one."""
        self._all[session.key] = session
        self.changes_count += 1
        self.on_news(session)

    def remove(self, session: Session) -> None:
        """It is there."""
        del self._all[session.key]
        self.changes_count += 1
        self.close(session)

    def on_news(self, session: Session) -> None:
        """It may have room again: whoever waits is to look. None of one that is not there."""
        if session.key in self._all:
            self._busy.discard(session)
            self._open.add(session)
            self.line.call_first()

    def close(self, session: Session) -> None:
        """Until there is news of it. Idempotent."""
        self._open.discard(session)
        self._busy.discard(session)

    def believe_busy(self, sessions: Sequence[Session], thresholds: Thresholds, until: float) -> None:
        """Of those that are open. until: in loop time; for all, the time that the first of them was given."""
        if not self.busy:
            self._belief = thresholds, until
        for session in sessions:
            self._open.discard(session)
            self._busy.add(session)

    def doubt_busy(self, thresholds: Thresholds | None, now: float) -> None:
        """Open those that are busy, if that was long ago or by other thresholds."""
        if not self.busy or (self._belief[0] == thresholds and now < self._belief[1]):
            return
        for session in list(self.busy):
            self._busy.discard(session)
            self._open.add(session)


class _Shelf(Generic[Session]):
    """A set that is a list, too: one can be drawn by its position."""

    def __init__(self) -> None:
        self.items: list[Session] = []
        self._positions: dict[str, int] = {}

    def add(self, session: Session) -> None:
        """Idempotent, as `discard` is."""
        if session.key not in self._positions:
            self._positions[session.key] = len(self.items)
            self.items.append(session)

    def discard(self, session: Session) -> None:
        position = self._positions.pop(session.key, None)
        if position is None:
            return
        last = self.items.pop()  # It takes the position that is free now.
        if last is not session:
            self.items[position] = last
            self._positions[last.key] = position
