"""The token columns of a `Step` (worker.proto): encode, decode, validate, merge and cut.

A step carries the tokens of many streams in columns. Entry i of a step is `stream_ids[i]`, `positions[i]` and the next
`token_counts[i]` of `token_ids`. `logprobs` refers to an entry by its index.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import accumulate, repeat
from operator import add

from services.core.errors import Failure, Reason
from services.core.interface import TokenLogprobs
from services.rpc.codec import logprobs_from_wire
from services.stubs import inference_pb2, worker_pb2

Entries = dict[int, tuple[int, list[int]]]
"""Stream id → the position of its first token, and its tokens."""


def put_entries(
    step: worker_pb2.Step, entries: Entries, logprobs: Mapping[int, Iterable[inference_pb2.TokenLogprobs]]
) -> None:
    """Fill an empty step.

    `logprobs`: stream id → one item for each of its tokens, for the streams that have log probabilities.
    """
    step.stream_ids.extend(entries)
    step.positions.extend([position for position, _ in entries.values()])
    step.token_counts.extend([len(token_ids) for _, token_ids in entries.values()])
    step.token_ids.extend([token for _, token_ids in entries.values() for token in token_ids])
    if logprobs:
        for index, stream_id in enumerate(entries):
            if (tokens := logprobs.get(stream_id)) is not None:
                step.logprobs.add(entry=index, tokens=tokens)


def read_entries(step: worker_pb2.Step) -> Iterable[tuple[int, int, list[int], Sequence[TokenLogprobs] | None]]:
    """The stream id, position, tokens and log probabilities (None: the entry has none) of each entry, in order.

    Raises PROTOCOL_VIOLATION, before the first entry, for columns of unequal length. The streams check the entries.
    """
    columns = _columns(step)
    if columns is None:
        raise Failure(Reason.PROTOCOL_VIOLATION, "the columns of a step have unequal lengths")
    stream_ids, positions, counts, token_ids = columns
    logprobs = _logprobs_column(step) if step.logprobs else repeat(None)
    return zip(stream_ids, positions, _grouped(token_ids, counts), logprobs, strict=False)


def _columns(step: worker_pb2.Step) -> tuple[list[int], list[int], list[int], list[int]] | None:
    """The columns, validated: None if an entry lacks a stream, a position, a count, or tokens that it counts.

    Each column is copied: to iterate over a message's own list takes twice as long.
    """
    stream_ids, positions, counts = step.stream_ids[:], step.positions[:], step.token_counts[:]
    token_ids = step.token_ids[:]
    if not len(stream_ids) == len(positions) == len(counts) or sum(counts) != len(token_ids):
        return None
    return stream_ids, positions, counts, token_ids


def _grouped(token_ids: list[int], counts: list[int]) -> list[list[int]]:
    """The tokens of each entry. The common case, one token for each, has a shortcut."""
    if counts.count(1) == len(counts):
        return [[token] for token in token_ids]
    start = 0
    return [token_ids[start : (start := start + count)] for count in counts]


def _logprobs_column(step: worker_pb2.Step) -> Sequence[Sequence[TokenLogprobs] | None]:
    """The log probabilities of each entry's tokens, or None."""
    found = {one.entry: one.tokens for one in step.logprobs}
    entries = range(len(step.stream_ids))
    return [[logprobs_from_wire(one) for one in found[index]] if index in found else None for index in entries]


class StepRun:
    """Consecutive steps of one session that can be merged into one."""

    def __init__(self) -> None:
        self._steps: list[worker_pb2.Step] = []
        self._next_positions: dict[int, int] = {}  # By stream id.
        self._with_logprobs: set[int] = set()  # Ids of the streams whose tokens all have log probabilities.

    def try_append(self, step: worker_pb2.Step) -> bool:
        """Append the step. Returns False and appends nothing if the step is malformed or does not continue the run.

        A step continues the run if each of its streams goes on at its next position, and has log probabilities for all
        of its tokens or for none of them.
        """
        columns = _columns(step)
        if columns is None:
            return False
        stream_ids, positions, counts, _ = columns
        starts = dict(zip(stream_ids, positions, strict=True))
        if len(starts) != len(stream_ids) or 0 in counts:
            return False
        if any(self._next_positions.get(stream_id, position) != position for stream_id, position in starts.items()):
            return False
        if not self._add_logprobs(step, starts.keys()):
            return False
        self._next_positions.update(zip(stream_ids, map(add, positions, counts), strict=True))
        self._steps.append(step)
        return True

    def _add_logprobs(self, step: worker_pb2.Step, stream_ids: Set[int]) -> bool:
        """Note which streams have log probabilities. Returns False and notes nothing if the step breaks that rule."""
        if not (step.logprobs or self._with_logprobs):
            return True
        counts: dict[int, int] = dict(enumerate(step.token_counts))
        if any(len(one.tokens) != counts.pop(one.entry, None) for one in step.logprobs):
            return False
        with_logprobs = {step.stream_ids[one.entry] for one in step.logprobs}
        if (with_logprobs ^ self._with_logprobs) & self._next_positions.keys() & stream_ids:
            return False
        self._with_logprobs |= with_logprobs
        return True

    def merge_into(self, merged: worker_pb2.Step) -> None:
        """Fill an empty step with one entry for each stream, in the order of their first entries."""
        entries: Entries = {}
        logprobs: dict[int, list[inference_pb2.TokenLogprobs]] = {}
        for step in self._steps:
            columns = _columns(step)
            assert columns is not None, "it was validated when it was appended"
            stream_ids, positions, counts, token_ids = columns
            for stream_id, position, tokens in zip(stream_ids, positions, _grouped(token_ids, counts), strict=True):
                entries.setdefault(stream_id, (position, []))[1].extend(tokens)
            for one in step.logprobs:
                logprobs.setdefault(stream_ids[one.entry], []).extend(one.tokens)
        put_entries(merged, entries, logprobs)


def cut(step: worker_pb2.Step, streams_max: int) -> Sequence[worker_pb2.Step]:
    """Cut the step into steps of at most `streams_max` entries, in order. A malformed step is returned as it is."""
    entry_count = len(step.stream_ids)
    if entry_count <= streams_max or (columns := _columns(step)) is None:
        return [step]
    stream_ids, positions, counts, token_ids = columns
    bounds = [0, *accumulate(counts)]  # Where the tokens of each entry begin, and where the last ones end.
    parts = []
    for start in range(0, entry_count, streams_max):
        stop = min(start + streams_max, entry_count)
        part = worker_pb2.Step(
            stream_ids=stream_ids[start:stop],
            positions=positions[start:stop],
            token_counts=counts[start:stop],
            token_ids=token_ids[bounds[start] : bounds[stop]],
        )
        for one in step.logprobs:
            if start <= one.entry < stop:
                part.logprobs.add(entry=one.entry - start, tokens=one.tokens)
        parts.append(part)
    return parts
