"""The log probabilities of a step, in columns (`LogprobColumns` of worker.proto), and as workers sent them before."""

from collections.abc import Mapping, Sequence
from itertools import islice, pairwise

from services.core.interface import TokenLogprobs
from services.rpc.codec import logprobs_from_wire, logprobs_to_wire
from services.stubs import worker_pb2

LogprobsOf = Mapping[int, Sequence[TokenLogprobs]]
"""Entry of a step → one item for each of its tokens."""


def put_logprobs(step: worker_pb2.Step, logprobs: LogprobsOf) -> None:
    """Fill the columns of a step that has none. `logprobs`: by entry, ascending."""
    columns = step.logprob_columns
    tokens = [one for entry in logprobs.values() for one in entry]
    columns.entries.extend(logprobs)
    columns.logprobs.extend([one.logprob for one in tokens])
    columns.top_counts.extend([len(one.top) for one in tokens])
    columns.top_token_ids.extend([token for one in tokens for token, _ in one.top])
    columns.top_logprobs.extend([value for one in tokens for _, value in one.top])


def read_logprobs(step: worker_pb2.Step, token_counts: Sequence[int]) -> LogprobsOf | None:
    """Return the log probabilities by entry. None: they do not fit each other, or the step."""
    columns = step.logprob_columns
    entries, counts, top_token_ids = columns.entries[:], columns.top_counts[:], columns.top_token_ids[:]
    values, top_values = columns.logprobs[:], columns.top_logprobs[:]
    is_ascending = all(before < after for before, after in pairwise(entries))
    if not is_ascending or (entries and entries[-1] >= len(token_counts)):
        return None
    token_count = sum([token_counts[entry] for entry in entries])
    if not (len(values) == len(counts) == token_count and sum(counts) == len(top_token_ids) == len(top_values)):
        return None
    top = zip(top_token_ids, top_values, strict=True)
    tokens = iter(
        [TokenLogprobs(value, tuple(islice(top, count))) for value, count in zip(values, counts, strict=True)]
    )
    return {entry: list(islice(tokens, token_counts[entry])) for entry in entries}


def put_entry_logprobs(step: worker_pb2.Step, logprobs: LogprobsOf) -> None:
    """The same as `put_logprobs`, for a frontend of a version that does not read columns."""
    for entry, tokens in logprobs.items():
        step.logprobs.add(entry=entry, tokens=map(logprobs_to_wire, tokens))


def read_entry_logprobs(step: worker_pb2.Step) -> LogprobsOf:
    """Return the log probabilities by entry, from a worker of a version that does not write columns."""
    return {one.entry: list(map(logprobs_from_wire, one.tokens)) for one in step.logprobs}
