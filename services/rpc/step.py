"""The token columns of a `Step` (worker.proto): encode, decode, validate, merge and cut.

A step carries the tokens of many streams in columns. Entry i of a step is `stream_ids[i]`, `positions[i]` and the next
`token_counts[i]` of `token_ids`. The columns of log probabilities refer to an entry by its index.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate, repeat
from operator import add

from services.core.errors import Failure, Reason
from services.core.interface import TokenLogprobs
from services.rpc.logprob_columns import Columns, columns_of, joined, put_items, read_columns, read_items
from services.stubs import worker_pb2

Entries = dict[int, tuple[int, list[int]]]
"""Stream id → the position of its first token, and its tokens."""
MERGED_TOKENS_MAX = 8
"""Steps with more tokens for each of their streams, on average, are not merged with others: to copy that many costs
more than one delta does. A record of a resumed answer has hundreds."""


def put_entries(
    step: worker_pb2.Step,
    entries: Entries,
    logprobs: Mapping[int, Sequence[TokenLogprobs]],
    *,
    has_columns: bool = True,
) -> None:
    """Fill an empty step.

    `logprobs`: stream id → one item for each of its tokens, for the streams that have log probabilities.
    `has_columns`: they are in columns, which a frontend of an earlier version does not read.
    """
    _put_tokens(step, entries)
    if logprobs:
        by_entry = {index: logprobs[stream_id] for index, stream_id in enumerate(entries) if stream_id in logprobs}
        if has_columns:
            columns_of(by_entry).put(step)
        else:
            put_items(step, by_entry)


def _put_tokens(step: worker_pb2.Step, entries: Entries) -> None:
    step.stream_ids.extend(entries)
    step.positions.extend([position for position, _ in entries.values()])
    step.token_counts.extend([len(token_ids) for _, token_ids in entries.values()])
    step.token_ids.extend([token for _, token_ids in entries.values() for token in token_ids])


def read_entries(step: worker_pb2.Step) -> Iterable[tuple[int, int, list[int], Sequence[TokenLogprobs] | None]]:
    """The stream id, position, tokens and log probabilities (None: the entry has none) of each entry, in order.

    Raises PROTOCOL_VIOLATION, before the first entry, for columns of unequal length. The streams check the entries.
    """
    columns = _read(step)
    if columns is None:
        raise Failure(Reason.PROTOCOL_VIOLATION, "the columns of a step have unequal lengths")
    logprobs: Iterable[Sequence[TokenLogprobs] | None] = repeat(None)
    if columns.logprobs is not None or step.logprobs:
        found = read_items(step) if columns.logprobs is None else columns.logprobs.by_entry(columns.counts)
        logprobs = map(found.get, range(len(columns.counts)))
    return zip(columns.stream_ids, columns.positions, columns.tokens(), logprobs, strict=False)


@dataclass(slots=True)
class _Step:
    """The columns of a step, each as a list. `logprobs`: None if it has no columns of log probabilities."""

    stream_ids: list[int]
    positions: list[int]
    counts: list[int]
    token_ids: list[int]
    logprobs: Columns | None

    def tokens(self) -> list[list[int]]:
        """The tokens of each entry. The common case, one token for each, has a shortcut."""
        if self.counts.count(1) == len(self.counts):
            return [[token] for token in self.token_ids]
        start = 0
        return [self.token_ids[start : (start := start + count)] for count in self.counts]


def _read(step: worker_pb2.Step) -> _Step | None:
    """The columns, validated: None if an entry lacks a stream, a position, a count, or what it counts.

    Each column is copied: to iterate over a message's own list takes twice as long.
    """
    stream_ids, positions, counts = step.stream_ids[:], step.positions[:], step.token_counts[:]
    token_ids = step.token_ids[:]
    if not len(stream_ids) == len(positions) == len(counts) or sum(counts) != len(token_ids):
        return None
    logprobs = None
    if step.HasField("logprob_columns") and (logprobs := read_columns(step, counts)) is None:
        return None
    return _Step(stream_ids, positions, counts, token_ids, logprobs)


class StepRun:
    """Consecutive steps of one session that can be merged into one."""

    def __init__(self) -> None:
        self._steps: list[_Step] = []
        self._next_positions: dict[int, int] = {}  # By stream id.
        self._with_logprobs: set[int] = set()  # Ids of the streams whose tokens all have log probabilities.

    def try_append(self, step: worker_pb2.Step) -> bool:
        """Append the step. Returns False and appends nothing if the step is malformed or does not continue the run.

        A step continues the run if each of its streams goes on at its next position, and has log probabilities for all
        of its tokens or for none of them. One of a worker that does not write them in columns is left as it is, and so
        is one beyond MERGED_TOKENS_MAX.
        """
        if step.logprobs or len(step.token_ids) > MERGED_TOKENS_MAX * len(step.stream_ids):
            return False
        if (columns := _read(step)) is None:
            return False
        starts = dict(zip(columns.stream_ids, columns.positions, strict=True))
        if len(starts) != len(columns.stream_ids) or 0 in columns.counts:
            return False
        if any(self._next_positions.get(stream_id, position) != position for stream_id, position in starts.items()):
            return False
        if not self._try_add_logprobs(columns, starts.keys()):
            return False
        self._next_positions.update(zip(columns.stream_ids, map(add, columns.positions, columns.counts), strict=True))
        self._steps.append(columns)
        return True

    def _try_add_logprobs(self, columns: _Step, stream_ids: Set[int]) -> bool:
        """Note which streams have log probabilities. Returns False and notes nothing if the step breaks that rule."""
        if columns.logprobs is None and not self._with_logprobs:
            return True
        entries = () if columns.logprobs is None else columns.logprobs.entries
        with_logprobs = {columns.stream_ids[entry] for entry in entries}
        if (with_logprobs ^ self._with_logprobs) & self._next_positions.keys() & stream_ids:
            return False
        self._with_logprobs |= with_logprobs
        return True

    def merge_into(self, merged: worker_pb2.Step) -> None:
        """Fill an empty step with one entry for each stream, in the order of their first entries."""
        entries: Entries = {}
        logprobs: dict[int, Columns] = {}
        for step in self._steps:
            for stream_id, position, token_ids in zip(step.stream_ids, step.positions, step.tokens(), strict=True):
                entries.setdefault(stream_id, (position, []))[1].extend(token_ids)
            if step.logprobs is not None:
                for entry, one in step.logprobs.split(step.counts):
                    logprobs.setdefault(step.stream_ids[entry], Columns()).extend(one)
        _put_tokens(merged, entries)
        if logprobs:
            numbers = enumerate(entries)
            joined({entry: logprobs[stream_id] for entry, stream_id in numbers if stream_id in logprobs}).put(merged)


def cut(step: worker_pb2.Step, streams_max: int) -> Sequence[worker_pb2.Step]:
    """Cut the step into steps of at most `streams_max` entries, in order.

    One that is malformed, or of a worker that does not write log probabilities in columns, is returned as it is.
    """
    if len(step.stream_ids) <= streams_max or step.logprobs or (columns := _read(step)) is None:
        return [step]
    stream_ids, positions, counts, token_ids = columns.stream_ids, columns.positions, columns.counts, columns.token_ids
    logprobs = {} if columns.logprobs is None else dict(columns.logprobs.split(counts))
    bounds = [0, *accumulate(counts)]  # Where the tokens of each entry begin, and where the last ones end.
    parts = []
    for start in range(0, len(stream_ids), streams_max):
        stop = min(start + streams_max, len(stream_ids))
        part = worker_pb2.Step(
            stream_ids=stream_ids[start:stop],
            positions=positions[start:stop],
            token_counts=counts[start:stop],
            token_ids=token_ids[bounds[start] : bounds[stop]],
        )
        if mine := {entry - start: one for entry, one in logprobs.items() if start <= entry < stop}:
            joined(mine).put(part)
        parts.append(part)
    return parts
