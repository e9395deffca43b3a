"""Merges consecutive messages of a worker into fewer with the same meaning, and cuts a message about very many streams.

Several messages wait together when this frontend is slower than its workers. Once merged, a stream's tokens of several
steps travel on as one delta and leave in one write, so tokens cost less when there are too many of them.
"""

from collections.abc import Sequence

from services.rpc.step import StepRun, cut
from services.stubs import worker_pb2


def coalesce(messages: Sequence[worker_pb2.WorkerMessage]) -> Sequence[worker_pb2.WorkerMessage]:
    """Merge messages, in order. A message that breaks the protocol is left as it is: the session rejects it."""
    groups: list[_Group] = []
    for message in messages:
        if not (groups and groups[-1].try_add(message)):
            groups.append(_Group(message))
    return [group.merged() for group in groups]


class _Group:
    """Messages that can be merged into one.

    The parts of a message are processed in the order of worker.proto. Messages can be merged if each stream still gets
    its items in the order in which they were sent.
    """

    def __init__(self, first: worker_pb2.WorkerMessage) -> None:
        self._messages = [first]
        self._steps = StepRun()
        self._is_closed = not self._steps.try_append(first.step)
        self._ended = {end.stream_id for end in first.ends}

    def try_add(self, message: worker_pb2.WorkerMessage) -> bool:
        """Add the message. Returns False and adds nothing if it cannot be merged with those before it."""
        if self._is_closed or self._messages[-1].HasField("goaway") or message.HasField("welcome"):
            return False
        if not self._ended.isdisjoint(message.step.stream_ids) or not self._steps.try_append(message.step):
            return False
        self._ended.update(end.stream_id for end in message.ends)
        self._messages.append(message)
        return True

    def merged(self) -> worker_pb2.WorkerMessage:
        """The group as one message."""
        if len(self._messages) == 1:
            return self._messages[0]
        merged = worker_pb2.WorkerMessage()
        if any(message.HasField("step") for message in self._messages):
            self._steps.merge_into(merged.step)
        for message in self._messages:
            merged.begun.extend(message.begun)
            merged.ends.extend(message.ends)
            merged.located.extend(message.located)
            for name in ("welcome", "goaway"):
                if message.HasField(name):
                    getattr(merged, name).CopyFrom(getattr(message, name))
        if loads := [message.load for message in self._messages if message.HasField("load")]:
            merged.load.CopyFrom(_merged_load(loads))
        return merged


def _merged_load(loads: Sequence[worker_pb2.Load]) -> worker_pb2.Load:
    """The last load. A rank that it does not name keeps its last report."""
    ranks = {rank.dp_rank: rank for load in loads for rank in load.ranks}
    if len(ranks) == len(loads[-1].ranks):
        return loads[-1]
    merged = worker_pb2.Load()
    merged.CopyFrom(loads[-1])
    del merged.ranks[:]
    merged.ranks.extend(ranks.values())
    return merged


def split(message: worker_pb2.WorkerMessage, streams_max: int) -> Sequence[worker_pb2.WorkerMessage]:
    """Cut the message into messages with tokens for at most `streams_max` streams, in order.

    A message that breaks the protocol is left as it is: the session rejects it.
    """
    steps = cut(message.step, streams_max)
    if len(steps) == 1:
        return [message]
    parts = [worker_pb2.WorkerMessage(step=step) for step in steps]
    first, last = parts[0], parts[-1]
    first.begun.extend(message.begun)
    last.ends.extend(message.ends)
    last.located.extend(message.located)
    for name, part in (("welcome", first), ("load", first), ("goaway", last)):
        if message.HasField(name):
            getattr(part, name).CopyFrom(getattr(message, name))
    return parts
