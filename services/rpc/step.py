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
from services.rpc.logprob_columns import (
    LogprobsOf,
    put_entry_logprobs,
    put_logprobs,
    read_entry_logprobs,
    read_logprobs,
)
from services.stubs import worker_pb2

Entries = dict[int, tuple[int, list[int]]]
"""Stream id → the position of its first token, and its tokens."""


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
    step.stream_ids.extend(entries)
    step.positions.extend([position for position, _ in entries.values()])
    step.token_counts.extend([len(token_ids) for _, token_ids in entries.values()])
    step.token_ids.extend([token for _, token_ids in entries.values() for token in token_ids])
    if logprobs:
        by_entry = {index: logprobs[stream_id] for index, stream_id in enumerate(entries) if stream_id in logprobs}
        (put_logprobs if has_columns else put_entry_logprobs)(step, by_entry)


def read_entries(step: worker_pb2.Step) -> Iterable[tuple[int, int, list[int], Sequence[TokenLogprobs] | None]]:
    """The stream id, position, tokens and log probabilities (None: the entry has none) of each entry, in order.

    Raises PROTOCOL_VIOLATION, before the first entry, for columns of unequal length. The streams check the entries.
    """
    columns = _read(step)
    if columns is None:
        raise Failure(Reason.PROTOCOL_VIOLATION, "the columns of a step have unequal lengths")
    return columns.entries()


@dataclass(slots=True)
class _Columns:
    """The columns of a step, each as a list. `logprobs`: by entry, for the entries that have log probabilities."""

    stream_ids: list[int]
    positions: list[int]
    counts: list[int]
    token_ids: list[int]
    logprobs: LogprobsOf

    def entries(self) -> Iterable[tuple[int, int, list[int], Sequence[TokenLogprobs] | None]]:
        logprobs = map(self.logprobs.get, range(len(self.counts))) if self.logprobs else repeat(None)
        return zip(self.stream_ids, self.positions, _grouped(self.token_ids, self.counts), logprobs, strict=False)


def _read(step: worker_pb2.Step) -> _Columns | None:
    """The columns, validated: None if an entry lacks a stream, a position, a count, or what it counts.

    Each column is copied: to iterate over a message's own list takes twice as long.
    """
    stream_ids, positions, counts = step.stream_ids[:], step.positions[:], step.token_counts[:]
    token_ids = step.token_ids[:]
    if not len(stream_ids) == len(positions) == len(counts) or sum(counts) != len(token_ids):
        return None
    logprobs = _read_logprobs(step, counts)
    return None if logprobs is None else _Columns(stream_ids, positions, counts, token_ids, logprobs)


def _read_logprobs(step: worker_pb2.Step, counts: Sequence[int]) -> LogprobsOf | None:
    if step.HasField("logprob_columns"):
        return read_logprobs(step, counts)
    return read_entry_logprobs(step) if step.logprobs else _NO_LOGPROBS


_NO_LOGPROBS: LogprobsOf = {}


def _grouped(token_ids: list[int], counts: list[int]) -> list[list[int]]:
    """The tokens of each entry. The common case, one token for each, has a shortcut."""
    if counts.count(1) == len(counts):
        return [[token] for token in token_ids]
    start = 0
    return [token_ids[start : (start := start + count)] for count in counts]


class StepRun:
    """Consecutive steps of one session that can be merged into one."""

    def __init__(self) -> None:
        self._steps: list[_Columns] = []
        self._next_positions: dict[int, int] = {}  # By stream id.
        self._with_logprobs: set[int] = set()  # Ids of the streams whose tokens all have log probabilities.

    def try_append(self, step: worker_pb2.Step) -> bool:
        """Append the step. Returns False and appends nothing if the step is malformed or does not continue the run.

        A step continues the run if each of its streams goes on at its next position, and has log probabilities for all
        of its tokens or for none of them. One of a worker that does not write them in columns is left as it is.
        """
        columns = None if step.logprobs else _read(step)
        if columns is None:
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

    def _try_add_logprobs(self, columns: _Columns, stream_ids: Set[int]) -> bool:
        """Note which streams have log probabilities. Returns False and notes nothing if the step breaks that rule."""
        if not (columns.logprobs or self._with_logprobs):
            return True
        with_logprobs = {columns.stream_ids[entry] for entry in columns.logprobs}
        if (with_logprobs ^ self._with_logprobs) & self._next_positions.keys() & stream_ids:
            return False
        self._with_logprobs |= with_logprobs
        return True

    def merge_into(self, merged: worker_pb2.Step) -> None:
        """Fill an empty step with one entry for each stream, in the order of their first entries."""
        entries: Entries = {}
        logprobs: dict[int, list[TokenLogprobs]] = {}
        for step in self._steps:
            for stream_id, position, token_ids, values in step.entries():
                entries.setdefault(stream_id, (position, []))[1].extend(token_ids)
                if values is not None:
                    logprobs.setdefault(stream_id, []).extend(values)
        put_entries(merged, entries, logprobs)


def cut(step: worker_pb2.Step, streams_max: int) -> Sequence[worker_pb2.Step]:
    """Cut the step into steps of at most `streams_max` entries, in order.

    One that is malformed, or of a worker that does not write log probabilities in columns, is returned as it is.
    """
    if len(step.stream_ids) <= streams_max or step.logprobs or (columns := _read(step)) is None:
        return [step]
    stream_ids, positions, counts, token_ids = columns.stream_ids, columns.positions, columns.counts, columns.token_ids
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
        if mine := {entry - start: one for entry, one in columns.logprobs.items() if start <= entry < stop}:
            put_logprobs(part, mine)
        parts.append(part)
    return parts
