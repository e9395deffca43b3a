"""The choices of one request on their way to one worker, where they get slots or queue places together: all or none.

One class serves both ends of a session. In a frontend a place is a stream id, and reserving sends the one message that
starts all choices. In a worker a place is a key in the dispatcher, and reserving asks it for all of them at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.core.errors import Failure

Reservation = tuple[Sequence[int], Callable[[int], None]]
"""One place for each choice, and the callback that gives a place back which its choice does not claim."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class ChoiceGroup:
    """The places of one request's choices on one worker.

    `count`: how many choices. `first`: the number of the first one. `worker`: the key of the session that the first
    choice was routed to; the others follow it there.
    """

    count: int
    first: int = 0
    worker: str | None = None
    _unclaimed: dict[int, int] | None = None  # choice → its place; None: nothing is reserved
    _left: set[int] = field(default_factory=set)
    _refusal: Failure | None = None
    _give_back: Callable[[int], None] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether no choice has left."""
        return not self._left

    def claim(self, choice: int, reserve: Callable[[int], Reservation]) -> int:
        """Return the place of a choice. The first choice to claim reserves places for all that have not left.

        `choice`: its number in the request, from `first` on. Raises what `reserve(count)` raises; every other choice
        then gets the same failure.
        """
        if self._refusal is not None:
            raise self._refusal.copy()
        if self._unclaimed is None:
            self._unclaimed = self._reserve(reserve)
        return self._unclaimed.pop(choice)

    def _reserve(self, reserve: Callable[[int], Reservation]) -> dict[int, int]:
        choices = [choice for choice in range(self.first, self.first + self.count) if choice not in self._left]
        try:
            places, self._give_back = reserve(len(choices))
        except Failure as failure:
            self._refusal = failure.copy()  # A copy has no traceback, which would refer back to this group.
            raise
        return dict(zip(choices, places, strict=True))

    def leave(self, choice: int) -> None:
        """Give up the place of a choice that has ended or will not come, now or later. Idempotent."""
        self._left.add(choice)
        if self._unclaimed and self._give_back is not None and (place := self._unclaimed.pop(choice, None)) is not None:
            self._give_back(place)

    def renew(self, worker: str) -> None:
        """Forget the refusal of `worker`, so that all choices try another one together.

        Idempotent: each refused choice calls it, and only the first call has an effect.
        """
        if self.worker == worker:
            self.release()
            self.worker, self._unclaimed, self._refusal, self._give_back = None, None, None, None

    def release(self) -> None:
        """Give back the places of choices that were cancelled before they claimed them."""
        if self._unclaimed and self._give_back is not None:
            unclaimed, self._unclaimed = self._unclaimed, {}
            for place in unclaimed.values():
                self._give_back(place)
