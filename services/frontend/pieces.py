"""Cuts what a worker says of very many streams at once, so that others have their turn between.

An engine steps all its sequences together. The tokens of 5,000 streams take a tenth of a second to pass on, and for as
long no probe is answered and no other worker's token moves.
"""

from collections.abc import Sequence
from itertools import accumulate

from services.stubs import worker_pb2


def pieces(message: worker_pb2.AttachResponse, streams_max: int) -> Sequence[worker_pb2.AttachResponse]:
    """The same in messages with tokens for at most so many streams, in order.

    What breaks the rules is left as it is, for whoever checks them.
    """
    step = message.step
    count = len(step.stream_ids)
    if count <= streams_max or not (count == len(step.positions) == len(step.token_counts)):
        return [message]
    ends = [0, *accumulate(step.token_counts)]
    if ends[-1] != len(step.token_ids):
        return [message]
    cuts = range(0, count, streams_max)
    cut = [worker_pb2.AttachResponse(step=_part(step, start, start + streams_max, ends)) for start in cuts]
    _give_rest(message, cut[0], cut[-1])
    return cut


def _part(step: worker_pb2.Step, start: int, stop: int, ends: Sequence[int]) -> worker_pb2.Step:
    """Entries `start` to `stop`. ends: for each entry where its tokens begin, and where the last one's end."""
    stop = min(stop, len(step.stream_ids))
    part = worker_pb2.Step(
        stream_ids=step.stream_ids[start:stop],
        positions=step.positions[start:stop],
        token_counts=step.token_counts[start:stop],
        token_ids=step.token_ids[ends[start] : ends[stop]],
    )
    for one in step.logprobs:
        if start <= one.entry < stop:
            part.logprobs.add(entry=one.entry - start, tokens=one.tokens)
    return part


def _give_rest(
    message: worker_pb2.AttachResponse, first: worker_pb2.AttachResponse, last: worker_pb2.AttachResponse
) -> None:
    """What is said before the tokens of a message to the first, what is said after them to the last."""
    first.begun.extend(message.begun)
    last.ends.extend(message.ends)
    for name, piece in (("welcome", first), ("load", first), ("goaway", last)):
        if message.HasField(name):
            getattr(piece, name).CopyFrom(getattr(message, name))
