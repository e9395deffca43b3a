"""The choices of one request on their way to one worker, where they get slots or places together: all, or none.

One class for both ends of a session. In a frontend a place is a stream id, and whoever reserves sends the one message
that starts them all. In a worker it is a key in the dispatcher, and whoever reserves asks for all of them at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.errors import Failure

Reservation = tuple[Sequence[int], Callable[[int], None]]
"""One place for each choice, and how to give back one that nobody takes."""


@dataclass(slots=True, eq=False)
class Party:
    """count: how many choices. worker: the session that the first of them was routed to, for the others to follow."""

    count: int
    first: int = 0
    worker: str | None = None
    _places: Sequence[int] = ()
    _refusal: Failure | None = None
    _give_back: Callable[[int], None] | None = None
    _untaken: set[int] | None = None

    def take(self, choice: int, reserve: Callable[[int], Reservation]) -> int:
        """The place of a choice. The first to come reserves for all: what it is refused with, all are.

        choice: as in the request, from `first` on. Raises what `reserve(count)` raises.
        """
        if self._refusal is not None:
            raise self._refusal.again()
        if self._untaken is None:
            try:
                self._places, self._give_back = reserve(self.count)
            except Failure as failure:
                self._refusal = failure
                raise
            self._untaken = set(self._places)
        place = self._places[choice - self.first]
        self._untaken.discard(place)
        return place

    def renew(self, worker: str) -> None:
        """Refused by `worker`: all will try again elsewhere, together. Idempotent: each of them says so."""
        if self.worker == worker:
            self.end()
            self.worker, self._places, self._refusal, self._give_back, self._untaken = None, (), None, None, None

    def end(self) -> None:
        """Give back the places that nobody has taken: those of choices that were cancelled before they came."""
        if self._untaken and self._give_back is not None:
            for place in sorted(self._untaken):
                self._give_back(place)
            self._untaken.clear()
