"""The choices of one request on their way to one worker, where they get slots or places together: all, or none.

One class for both ends of a session. In a frontend a place is a stream id, and whoever reserves sends the one message
that starts them all. In a worker it is a key in the dispatcher, and whoever reserves asks for all of them at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.core.errors import Failure

Reservation = tuple[Sequence[int], Callable[[int], None]]
"""One place for each choice, and how to give back one that nobody takes."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class ChoiceGroup:
    """count: how many choices. first: the number of the first of them. worker: the session that the first to come was
    routed to, for the others to follow.
    """

    count: int
    first: int = 0
    worker: str | None = None
    _untaken: dict[int, int] | None = None  # choice → its place; None: nothing is reserved
    _gone: set[int] = field(default_factory=set)
    _refusal: Failure | None = None
    _give_back: Callable[[int], None] | None = None

    @property
    def is_whole(self) -> bool:
        """Whether none has left."""
        return not self._gone

    def take(self, choice: int, reserve: Callable[[int], Reservation]) -> int:
        """The place of a choice. The first to come reserves for all that may come: what it is refused with, all are.

        choice: as in the request, from `first` on. Raises what `reserve(count)` raises.
        """
        if self._refusal is not None:
            raise self._refusal.again()
        if self._untaken is None:
            self._untaken = self._reserve(reserve)
        return self._untaken.pop(choice)

    def _reserve(self, reserve: Callable[[int], Reservation]) -> dict[int, int]:
        coming = [choice for choice in range(self.first, self.first + self.count) if choice not in self._gone]
        try:
            places, self._give_back = reserve(len(coming))
        except Failure as failure:
            self._refusal = failure.again()  # Without its traceback, which would hold this party in a circle.
            raise
        return dict(zip(coming, places, strict=True))

    def leave(self, choice: int) -> None:
        """This choice has ended, or never comes: no place is kept for it, now or later. Idempotent."""
        self._gone.add(choice)
        if self._untaken and self._give_back is not None and (place := self._untaken.pop(choice, None)) is not None:
            self._give_back(place)

    def renew(self, worker: str) -> None:
        """Refused by `worker`: all will try again elsewhere, together. Idempotent: each of them says so."""
        if self.worker == worker:
            self.end()
            self.worker, self._untaken, self._refusal, self._give_back = None, None, None, None

    def end(self) -> None:
        """Give back the places that nobody has taken: those of choices that were cancelled before they came."""
        if self._untaken and self._give_back is not None:
            untaken, self._untaken = self._untaken, {}
            for place in untaken.values():
                self._give_back(place)
