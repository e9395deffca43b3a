"""The sessions to workers of one model, which of them are worth a look, and who waits for room on one.

One that was found without room for a single request, or leaving, is set aside until there is news of it. So a look
costs the same however many workers are full.
"""

from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from services.card import ModelCard
from services.frontend.line import Line


class Keyed(Protocol):
    """A session."""

    @property
    def key(self) -> str: ...


Session = TypeVar("Session", bound=Keyed)


class Roster(Generic[Session]):
    """Each change costs the same, however many there are."""

    def __init__(self, card: ModelCard, line: Line | None = None) -> None:
        self.card = card
        self.line = line or Line()
        self._all: dict[str, Session] = {}
        self._open: list[Session] = []
        self._positions: dict[str, int] = {}  # In `_open`; those set aside have none.

    def __iter__(self) -> Iterator[Session]:
        return iter(self._all.values())

    def __len__(self) -> int:
        return len(self._all)

    @property
    def open(self) -> Sequence[Session]:
        """Those that are not set aside, in no order. A view: it changes with the roster."""
        return self._open

    def add(self, session: Session) -> None:
        """A new one."""
        self._all[session.key] = session
        self.on_news(session)

    def remove(self, session: Session) -> None:
        """It is there."""
        del self._all[session.key]
        self.set_aside(session)

    def on_news(self, session: Session) -> None:
        """It may have room again: whoever waits is to look. None of one that is not there."""
        if session.key not in self._all:
            return
        if session.key not in self._positions:
            self._positions[session.key] = len(self._open)
            self._open.append(session)
        self.line.call_first()

    def set_aside(self, session: Session) -> None:
        """Until there is news of it. Idempotent."""
        position = self._positions.pop(session.key, None)
        if position is None:
            return
        last = self._open.pop()  # It takes the position that is free now.
        if last is not session:
            self._open[position] = last
            self._positions[last.key] = position
