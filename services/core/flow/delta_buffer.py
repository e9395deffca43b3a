"""Buffers deltas for a slow client: the deltas of each choice are joined into fewer, larger ones of bounded size."""

from array import array
from collections.abc import Callable

from services.core.interface import Delta, TokenLogprobs, Usage
from services.core.request import Continuation, FinishReason

PIECE_BYTES_MAX = 16 * 1024
"""Nothing is added to a piece of this size: progress of a client that reads little at a time stays visible, and writing
one piece does not block the event loop."""
TOKEN_BYTES = 4
"""Size that is counted for a token id: its memory, and about its size on the wire."""
LOGPROB_BYTES = 64
"""Size that is counted for a log probability, alternatives included: about its size as JSON."""


def size_of(delta: Delta) -> int:
    """The size that is counted for the tokens and log probabilities of a delta, in bytes."""
    token_count = len(delta.token_ids)
    return TOKEN_BYTES * token_count + LOGPROB_BYTES * (delta.weight - token_count)


class _Piece:
    """Consecutive deltas of one choice, stored in arrays because single texts and tokens are small objects."""

    __slots__ = (
        "choice",
        "continuation",
        "finish_reason",
        "logprobs",
        "position",
        "prompt_tokens",
        "size",
        "text",
        "token_ids",
        "usage",
    )

    def __init__(self, choice: int, position: int) -> None:
        self.choice = choice
        self.position = position
        self.token_ids = array("I")
        self.text = bytearray()
        self.logprobs: list[TokenLogprobs] | None = None
        self.finish_reason: FinishReason | None = None
        self.continuation: Continuation | None = None
        self.usage: Usage | None = None
        self.prompt_tokens = 0
        self.size = 0

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.position + len(self.token_ids)

    def add(self, delta: Delta) -> int:
        """Append a delta. Returns the size that it adds, in bytes."""
        text = delta.text.encode(errors="surrogatepass")  # Lone surrogates are for the writer to refuse.
        if delta.logprobs is not None:
            if self.logprobs is None:
                assert not self.token_ids, "either all deltas with tokens have log probabilities, or none has"
                self.logprobs = []
            self.logprobs.extend(delta.logprobs)
        self.token_ids.extend(delta.token_ids)
        self.text += text
        self.finish_reason, self.usage = delta.finish_reason, delta.usage
        self.prompt_tokens, self.continuation = delta.prompt_tokens, delta.continuation
        size = len(text) + size_of(delta)
        self.size += size
        return size

    def delta(self) -> Delta:
        """The piece as one delta."""
        text = self.text.decode(errors="surrogatepass")
        token_ids = self.token_ids.tolist()
        return Delta(
            self.position,
            token_ids,
            text,
            self.choice,
            self.logprobs,
            self.finish_reason,
            self.usage,
            self.prompt_tokens,
            self.continuation,
        )


def _ignore(_: int) -> None:
    """The size of the buffer is not reported."""


class DeltaBuffer:
    """Deltas that wait for their client, oldest first. `size`: in bytes.

    A text counts as its UTF-8. The framing on the wire comes once for each piece and is not counted. There are few
    pieces, mostly none: an empty list takes a tenth of the memory of an empty deque.
    """

    __slots__ = ("_last", "_on_size", "_pieces", "size")

    def __init__(self, on_size: Callable[[int], None] = _ignore) -> None:
        """`on_size`: called with the size whenever it has changed."""
        self.size = 0
        self._on_size = on_size
        self._pieces: list[_Piece] = []
        self._last: dict[int, _Piece] = {}  # choice → the piece that its next delta is added to

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def add(self, delta: Delta) -> int:
        """Append the next delta of its choice. Does not change the delta. Returns the size that it adds, in bytes."""
        piece = self._last.get(delta.choice)
        assert piece is None or delta.position == piece.end, "a gap between deltas"
        if piece is None or piece.size >= PIECE_BYTES_MAX:
            piece = self._last[delta.choice] = _Piece(delta.choice, delta.position)
            self._pieces.append(piece)
        added = piece.add(delta)
        self.size += added
        if delta.usage is not None and piece is not self._pieces[-1]:  # The usage comes with the last delta of all.
            self._pieces.remove(piece)
            self._pieces.append(piece)
        self._on_size(self.size)
        return added

    def pop(self) -> Delta:
        """Remove the oldest piece and return it as one delta."""
        piece = self._pieces.pop(0)
        if self._last[piece.choice] is piece:
            del self._last[piece.choice]
        self.size -= piece.size
        self._on_size(self.size)
        return piece.delta()
