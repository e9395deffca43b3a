"""The log probabilities of a step, in columns (`LogprobColumns` of worker.proto), and as workers sent them before."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise

from services.core.interface import TokenLogprobs
from services.rpc.codec import logprobs_from_wire, logprobs_to_wire
from services.stubs import worker_pb2

LogprobsOf = Mapping[int, Sequence[TokenLogprobs]]
"""Entry of a step → one item for each of its tokens."""


@dataclass(slots=True)
class Columns:
    """Columns as lists: see `LogprobColumns` of worker.proto. `entries`: ascending."""

    entries: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_counts: list[int] = field(default_factory=list)
    top_token_ids: list[int] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)

    def extend(self, other: "Columns") -> None:
        """Append the tokens of other columns, without their entries."""
        self.logprobs += other.logprobs
        self.top_counts += other.top_counts
        self.top_token_ids += other.top_token_ids
        self.top_logprobs += other.top_logprobs

    def by_entry(self, token_counts: Sequence[int]) -> LogprobsOf:
        """The tokens of each entry. `token_counts`: of all entries of the step.

        Most have one alternative or none, which takes half the time that it takes to cut a slice.
        """
        top = zip(self.top_token_ids, self.top_logprobs, strict=True)
        pairs = zip(self.logprobs, self.top_counts, strict=True)
        tokens = iter(
            [
                TokenLogprobs(logprob, (next(top),) if count == 1 else tuple(islice(top, count)))
                if count
                else TokenLogprobs(logprob)
                for logprob, count in pairs
            ]
        )
        return {entry: list(islice(tokens, token_counts[entry])) for entry in self.entries}

    def split(self, token_counts: Sequence[int]) -> Iterator[tuple[int, "Columns"]]:
        """Each entry with columns of its own."""
        start = top_start = 0
        for entry in self.entries:
            stop = start + token_counts[entry]
            top_stop = top_start + sum(self.top_counts[start:stop])
            yield (
                entry,
                Columns(
                    logprobs=self.logprobs[start:stop],
                    top_counts=self.top_counts[start:stop],
                    top_token_ids=self.top_token_ids[top_start:top_stop],
                    top_logprobs=self.top_logprobs[top_start:top_stop],
                ),
            )
            start, top_start = stop, top_stop

    def put(self, step: worker_pb2.Step) -> None:
        """Fill the columns of a step that has none."""
        columns = step.logprob_columns
        columns.entries.extend(self.entries)
        columns.logprobs.extend(self.logprobs)
        columns.top_counts.extend(self.top_counts)
        columns.top_token_ids.extend(self.top_token_ids)
        columns.top_logprobs.extend(self.top_logprobs)


def columns_of(logprobs: LogprobsOf) -> Columns:
    """The columns of these entries, which are in ascending order."""
    tokens = [one for entry in logprobs.values() for one in entry]
    return Columns(
        entries=list(logprobs),
        logprobs=[one.logprob for one in tokens],
        top_counts=[len(one.top) for one in tokens],
        top_token_ids=[token for one in tokens for token, _ in one.top],
        top_logprobs=[logprob for one in tokens for _, logprob in one.top],
    )


def joined(by_entry: Mapping[int, Columns]) -> Columns:
    """One for all entries, which are in ascending order."""
    columns = Columns(entries=list(by_entry))
    for one in by_entry.values():
        columns.extend(one)
    return columns


def read_columns(step: worker_pb2.Step, token_counts: Sequence[int]) -> Columns | None:
    """The columns of a step that has them. None: they do not fit each other, or the step.

    Each is copied: to iterate over a message's own list takes twice as long.
    """
    given = step.logprob_columns
    columns = Columns(
        given.entries[:], given.logprobs[:], given.top_counts[:], given.top_token_ids[:], given.top_logprobs[:]
    )
    entries = columns.entries
    is_ascending = all(before < after for before, after in pairwise(entries))
    if not is_ascending or (entries and entries[-1] >= len(token_counts)):
        return None
    token_count = sum([token_counts[entry] for entry in entries])
    top_count = sum(columns.top_counts)
    are_equal = len(columns.logprobs) == len(columns.top_counts) == token_count
    are_top_equal = len(columns.top_token_ids) == len(columns.top_logprobs) == top_count
    return columns if are_equal and are_top_equal else None


def put_items(step: worker_pb2.Step, logprobs: LogprobsOf) -> None:
    """Fill a step for a frontend of a version that does not read columns."""
    for entry, tokens in logprobs.items():
        step.logprobs.add(entry=entry, tokens=map(logprobs_to_wire, tokens))


def read_items(step: worker_pb2.Step) -> LogprobsOf:
    """The log probabilities by entry, from a worker of a version that does not write columns."""
    return {one.entry: list(map(logprobs_from_wire, one.tokens)) for one in step.logprobs}
