"""What a client has not taken yet: the deltas of each choice, joined into fewer and larger ones of a bounded size."""

from array import array
from collections import deque

from services.core.interface import Delta, TokenLogprobs, Usage
from services.core.request import FinishReason

PIECE_BYTES_MAX = 16 * 1024
"""A joined delta takes no more once it is as large as this: so a client that reads little at a time is seen to read,
and no large one holds up the loop while it is written."""
TOKEN_BYTES = 4
"""What is counted for a token id: what it takes to hold, and about what it takes on the wire."""
LOGPROB_BYTES = 64
"""What is counted for a log probability, a rival's as well: about what it takes as JSON."""


class _Piece:
    """Deltas of one choice that follow each other; held as compactly as can be: texts and tokens are small objects."""

    __slots__ = ("choice", "finish_reason", "logprobs", "position", "size", "text", "token_ids", "usage")

    def __init__(self, choice: int, position: int) -> None:
        self.choice = choice
        self.position = position
        self.token_ids = array("I")
        self.text = bytearray()
        self.logprobs: list[TokenLogprobs] | None = None
        self.finish_reason: FinishReason | None = None
        self.usage: Usage | None = None
        self.size = 0

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.position + len(self.token_ids)

    def add(self, delta: Delta) -> int:
        """Add what comes next. Returns how many bytes it counts."""
        text = delta.text.encode(errors="surrogatepass")  # What is no text is for the writer to refuse.
        if delta.logprobs is not None:
            if self.logprobs is None:
                assert not self.token_ids, "all deltas with tokens have log probabilities, or none"
                self.logprobs = []
            self.logprobs.extend(delta.logprobs)
        self.token_ids.extend(delta.token_ids)
        self.text += text
        self.finish_reason, self.usage = delta.finish_reason, delta.usage
        token_count = len(delta.token_ids)
        size = len(text) + TOKEN_BYTES * token_count + LOGPROB_BYTES * (delta.weight - token_count)
        self.size += size
        return size

    def delta(self) -> Delta:
        """All of it as one."""
        text = self.text.decode(errors="surrogatepass")
        token_ids = self.token_ids.tolist()
        return Delta(self.position, token_ids, text, self.choice, self.logprobs, self.finish_reason, self.usage)


class DeltaBuffer:
    """Deltas that wait for their client, oldest first. `size` is what they count, in bytes.

    A text counts the bytes of its UTF-8; what surrounds it on the wire comes once for each piece and is not counted.
    """

    def __init__(self) -> None:
        self.size = 0
        self._pieces: deque[_Piece] = deque()
        self._last: dict[int, _Piece] = {}  # choice → the piece that it goes on with

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def add(self, delta: Delta) -> None:
        """Take what comes next of its choice. The delta itself stays as it is."""
        piece = self._last.get(delta.choice)
        assert piece is None or delta.position == piece.end, "a gap between deltas"
        if piece is None or piece.size >= PIECE_BYTES_MAX:
            piece = self._last[delta.choice] = _Piece(delta.choice, delta.position)
            self._pieces.append(piece)
        self.size += piece.add(delta)
        if delta.usage is not None and piece is not self._pieces[-1]:  # Comes with the last of all, and only there.
            self._pieces.remove(piece)
            self._pieces.append(piece)

    def pop(self) -> Delta:
        """The oldest piece, as one delta."""
        piece = self._pieces.popleft()
        if self._last[piece.choice] is piece:
            del self._last[piece.choice]
        self.size -= piece.size
        return piece.delta()
