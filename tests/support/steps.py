"""Builds the token columns of a session's messages for tests."""

from collections.abc import Sequence

from services.stubs import worker_pb2


def step_of(*entries: tuple[int, int, Sequence[int]]) -> worker_pb2.Step:
    """A step with these entries: stream id, position, tokens."""
    return worker_pb2.Step(
        stream_ids=[stream_id for stream_id, _, _ in entries],
        positions=[position for _, position, _ in entries],
        token_counts=[len(token_ids) for _, _, token_ids in entries],
        token_ids=[token for _, _, token_ids in entries for token in token_ids],
    )


def add_logprobs(step: worker_pb2.Step, *entries: tuple[int, Sequence[float]]) -> worker_pb2.Step:
    """The step itself, with columns of log probabilities: the index of an entry, and a value for each of its tokens."""
    columns = step.logprob_columns
    for index, values in entries:
        columns.entries.append(index)
        columns.logprobs.extend(values)
        columns.top_counts.extend([0] * len(values))
    return step
