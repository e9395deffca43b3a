"""How much of a resumed answer its client may leave unread: what workers have of it comes faster than clients read."""

from collections.abc import Callable, Mapping

from services.core.interface import Delta


class ReplayRoom:
    """Counts what comes from workers' records. A client may leave as much unread, in addition to its bound.

    The records are bounded, and a client that reads nothing is ended in any case. `size`: in bytes, as its users count
    them.
    """

    __slots__ = ("_ends", "size")

    def __init__(self, ends: Mapping[int, int]) -> None:
        """`ends`: the position after the record of each choice that has one."""
        self._ends = ends
        self.size = 0

    def add(self, delta: Delta, size: int) -> None:
        """Count a delta, if it begins in its record."""
        if delta.position < self._ends.get(delta.choice, 0):
            self.size += size

    def noting(self, events_of: Callable[[Delta], bytes]) -> Callable[[Delta], bytes]:
        """`events_of`, whose events are counted."""

        def noted(delta: Delta) -> bytes:
            events = events_of(delta)
            self.add(delta, len(events))
            return events

        return noted
