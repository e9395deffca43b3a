"""One data-parallel rank of the mocker: its requests, and the key-value cache that they share.

The cache goes to the oldest requests, as many as fit. A request takes the blocks of its whole prompt at once, and more
blocks as its answer grows; requests that do not fit wait. When the answers outgrow the cache, the youngest request
gives its blocks back and waits like a new one: all its tokens, including those drawn, are computed again. `used` thus
never exceeds `total`.
"""

from itertools import islice
from operator import attrgetter

from services.worker.engine import RankLoad
from services.worker.engines.mocker.sequence import MockerSequence

Chunk = tuple[MockerSequence, int]
"""A sequence and the number of its prompt tokens that a step computes."""


class Rank:
    """One rank with `blocks_total` blocks of `block_tokens` tokens. No request may need more than all of them."""

    def __init__(self, number: int, *, blocks_total: int, block_tokens: int) -> None:
        self._number = number
        self._blocks_total = blocks_total
        self._block_tokens = block_tokens
        self._sequences: dict[int, MockerSequence] = {}  # Oldest first.

    @property
    def token_count(self) -> int:
        return sum(
            map(attrgetter("token_count"), self._sequences.values())
        )  # Called for each submission, so it must be fast.

    def add(self, sequence: MockerSequence) -> None:
        self._sequences[sequence.key] = sequence

    def remove(self, key: int) -> MockerSequence | None:
        """Remove the sequence and return it; None if there is none."""
        return self._sequences.pop(key, None)

    def fit(self) -> list[MockerSequence]:
        """Return the sequences that fit in the cache. The others lose what was computed of them."""
        residents = self._residents()
        for sequence in islice(self._sequences.values(), len(residents), None):
            sequence.prefill_left = sequence.token_count
        return residents

    def load(self) -> RankLoad:
        residents = self._residents()
        used = sum(self._blocks(sequence) for sequence in residents)
        prefill = sum(sequence.prefill_left for sequence in residents)
        waiting = islice(self._sequences.values(), len(residents), None)
        prefill += sum(sequence.token_count for sequence in waiting)
        return RankLoad(used, self._blocks_total, prefill, self._number)

    def _residents(self) -> list[MockerSequence]:
        free, residents = self._blocks_total, []
        for sequence in self._sequences.values():
            free -= self._blocks(sequence)
            if free < 0:
                break
            residents.append(sequence)
        return residents

    def _blocks(self, sequence: MockerSequence) -> int:
        return -(-sequence.token_count // self._block_tokens)


def next_chunks(residents: list[MockerSequence], chunk_tokens: int) -> list[Chunk]:
    """The prompt chunks of the next step: at most `chunk_tokens` tokens in all, oldest sequence first."""
    chunks = []
    for sequence in residents:
        if chunk_tokens == 0:
            break
        if sequence.prefill_left:
            size = min(chunk_tokens, sequence.prefill_left)
            chunks.append((sequence, size))
            chunk_tokens -= size
    return chunks
