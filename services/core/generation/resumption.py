"""What of a resumed answer its client has, and whether the client's cursor fits the answer."""

from collections.abc import Sequence

from services.core.errors import Failure, Reason
from services.core.generation.cursor import Cursor, CursorWriter
from services.core.interface import Delta
from services.core.request import Request


def bases_of(request: Request) -> Sequence[int]:
    """How many tokens of each choice the client itself has sent."""
    return [len(part.generated_of(choice)) for part in request.parts or (request,) for choice in range(request.n)]


def room_of(request: Request) -> Sequence[int]:
    """How many tokens each choice may have after these."""
    return [
        part.max_tokens - len(part.generated_of(choice))
        for part in request.parts or (request,)
        for choice in range(request.n)
    ]


class Resumption:
    """Passes on the deltas that a client does not have, once its cursor has been checked against those that it has.

    An answer comes from its beginning, and its deltas are cut at the cursor. `known`: the cursor of the deltas that the
    client has. Count in it what is sent.
    """

    __slots__ = ("_bases", "_client", "_ended", "_has_failed", "_is_checked", "_waiting", "known")

    def __init__(self, cursor: Cursor, bases: Sequence[int]) -> None:
        """`cursor`: the client's. `bases`: see `bases_of`."""
        self._client = cursor
        self._bases = bases
        self.known = CursorWriter(len(bases))
        self._ended = [False] * len(bases)
        self._waiting: list[Delta] = []
        self._is_checked = self._has_failed = False

    def has(self, delta: Delta) -> bool:
        """Whether the client has the delta."""
        if delta.choice >= len(self._client.positions):
            return False
        if delta.finish_reason is not None:
            return self._client.ended[delta.choice]
        return delta.position + len(delta.token_ids) <= self._client.positions[delta.choice]

    @property
    def is_past(self) -> bool:
        """Whether the client has nothing of what follows: each further delta is new, and need not be taken.

        Never if the client has the end of a choice: whether that choice goes on must be checked.
        """
        return self._is_checked and not self._has_failed and not any(self._client.ended)

    def take(self, delta: Delta) -> Sequence[Delta]:
        """Take the next delta of the answer. Returns those to send now, and nothing after a failure.

        Raises RESUME_DIVERGED or CURSOR_BEYOND_END if the cursor does not fit.
        """
        if self._has_failed:
            return ()
        try:
            self._check_delta(delta)
            return (delta,) if self._is_checked else self._take_unchecked(delta)
        except Failure:
            self._has_failed, self._waiting = True, []
            raise

    def _take_unchecked(self, delta: Delta) -> Sequence[Delta]:
        is_end = delta.finish_reason is not None
        if self.has(delta):
            self.known.add(delta.choice, delta.position, delta.token_ids, is_end=is_end)
            self._ended[delta.choice] |= is_end
        else:
            self._waiting.append(delta)
        if not self._is_complete:
            if delta.usage is not None:
                raise Failure(Reason.CURSOR_BEYOND_END, "the answer has fewer tokens than the cursor says")
            return ()
        if self.known.checksum != self._client.checksum:
            detail = "the tokens before the cursor are not those that this answer has"
            raise Failure(Reason.RESUME_DIVERGED, detail)
        self._is_checked = True
        waiting, self._waiting = self._waiting, []
        return waiting

    def _check_delta(self, delta: Delta) -> None:
        """Raise the failure if the delta shows that the cursor does not fit."""
        client, choice = self._client, delta.choice
        if len(client.positions) != len(self._bases):
            detail = "the cursor is that of an answer with another number of choices"
            raise Failure(Reason.RESUME_DIVERGED, detail)
        if delta.finish_reason is not None and delta.position < client.positions[choice]:
            detail = f"the answer has {delta.position} tokens, and the cursor is at {client.positions[choice]}"
            raise Failure(Reason.CURSOR_BEYOND_END, detail)
        if client.ended[choice] and not self.has(delta):
            raise Failure(Reason.RESUME_DIVERGED, "the answer goes on after the end that the cursor says")

    @property
    def _is_complete(self) -> bool:
        """Whether everything before the cursor has come."""
        client, known = self._client, self.known
        return self._ended == list(client.ended) and all(
            position <= base or known.position(choice) == position
            for choice, (position, base) in enumerate(zip(client.positions, self._bases, strict=True))
        )
