"""The items of an answer that can be resumed: each says what its client has then, and none comes twice."""

from collections.abc import Sequence

from services.core.generation.cursor import CursorWriter
from services.core.generation.kept import Kept
from services.core.generation.resumption import Resumption, bases_of
from services.core.interface import Delta
from services.core.request import Request


class KeptItems:
    """The cursor of one kept answer, and what is left of it if it is resumed."""

    __slots__ = ("_cursor", "_resumption")

    def __init__(self, kept: Kept, request: Request) -> None:
        bases = bases_of(request)
        # None once all deltas are new.
        self._resumption = None if kept.cursor is None else Resumption(kept.cursor, bases)
        self._cursor = CursorWriter(len(bases)) if self._resumption is None else self._resumption.known

    def new(self, delta: Delta) -> Sequence[Delta]:
        """Take the next delta of the answer. Returns those that are to be sent now.

        The usage is sent in any case: alone, if the client has the end with which it comes. Raises RESUME_DIVERGED or
        CURSOR_BEYOND_END if the client's cursor does not fit.
        """
        if self._resumption is None:
            return (delta,)
        new = self._resumption.take(delta)
        if self._resumption.is_past:
            self._resumption = None
            return new
        if delta.usage is None or not self._resumption.has(delta):
            return new
        return (*new, Delta(delta.position, (), choice=delta.choice, usage=delta.usage))

    def cursor_after(self, delta: Delta) -> str:
        """The cursor of the item with this delta. Call it for each, in the order in which they are sent."""
        is_end = delta.finish_reason is not None or delta.usage is not None
        self._cursor.add(delta.choice, delta.position, delta.token_ids, is_end=is_end)
        return self._cursor.text
