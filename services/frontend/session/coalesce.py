"""Joins what several messages of a worker say into fewer with the same meaning.

Messages come together when this frontend is slower than its workers. Joined, a stream's tokens of several steps travel
on as one delta and leave in one write: so a token costs less just where there are too many.
"""

from collections.abc import Sequence
from itertools import accumulate

from services.stubs import worker_pb2
from services.stubs.inference_pb2 import TokenLogprobs


def coalesce(messages: Sequence[worker_pb2.WorkerMessage]) -> Sequence[worker_pb2.WorkerMessage]:
    """The same in fewer messages, in order. What breaks the rules is left as it is, for whoever checks them."""
    groups: list[_Group] = []
    for message in messages:
        if not (groups and groups[-1].take(message)):
            groups.append(_Group(message))
    return [group.message() for group in groups]


class _Group:
    """Messages that can be one: the order of a message's parts is also that of what they say about each stream."""

    def __init__(self, first: worker_pb2.WorkerMessage) -> None:
        self._messages = [first]
        self._due: dict[int, int] = {}  # stream id → the position that its next token must have
        self._with_logprobs: set[int] = set()  # Streams that have had tokens with them: not one without.
        self._is_closed = not self._add_positions(first.step)
        self._ended = {end.stream_id for end in first.ends}

    def take(self, message: worker_pb2.WorkerMessage) -> bool:
        """Whether it goes with those before."""
        if self._is_closed or self._messages[-1].HasField("goaway") or message.HasField("welcome"):
            return False
        if not self._ended.isdisjoint(message.step.stream_ids) or not self._add_positions(message.step):
            return False
        self._ended.update(end.stream_id for end in message.ends)
        self._messages.append(message)
        return True

    def _add_positions(self, step: worker_pb2.Step) -> bool:
        """Whether the step is sound, and each of its streams goes on where it was."""
        if not len(step.stream_ids) == len(step.positions) == len(step.token_counts) or 0 in step.token_counts:
            return False
        due = dict(zip(step.stream_ids, step.positions, strict=True))
        if any(self._due.get(stream_id, position) != position for stream_id, position in due.items()):
            return False
        if not self._add_logprobs(step):
            return False
        counts = zip(step.stream_ids, step.positions, step.token_counts, strict=True)
        self._due.update((stream_id, position + count) for stream_id, position, count in counts)
        return len(due) == len(step.stream_ids) and sum(step.token_counts) == len(step.token_ids)

    def _add_logprobs(self, step: worker_pb2.Step) -> bool:
        """Whether there is one for each token of an entry that has any, and each stream has them always or never."""
        if not (step.logprobs or self._with_logprobs):
            return True
        counts = dict(enumerate(step.token_counts))
        if any(len(one.tokens) != counts.pop(one.entry, 0) for one in step.logprobs):
            return False
        with_them = {step.stream_ids[one.entry] for one in step.logprobs}
        if (with_them ^ self._with_logprobs) & self._due.keys() & set(step.stream_ids):
            return False
        self._with_logprobs |= with_them
        return True

    def message(self) -> worker_pb2.WorkerMessage:
        if len(self._messages) == 1:
            return self._messages[0]
        whole = worker_pb2.WorkerMessage(step=_step([message.step for message in self._messages]))
        for message in self._messages:
            whole.begun.extend(message.begun)
            whole.ends.extend(message.ends)
            for name in ("welcome", "goaway"):
                if message.HasField(name):
                    getattr(whole, name).CopyFrom(getattr(message, name))
        if loads := [message.load for message in self._messages if message.HasField("load")]:
            whole.load.CopyFrom(_load(loads))
        return whole


def _load(loads: Sequence[worker_pb2.Load]) -> worker_pb2.Load:
    """The last, and of ranks that it does not name what they said before."""
    ranks = {rank.dp_rank: rank for load in loads for rank in load.ranks}
    if len(ranks) == len(loads[-1].ranks):
        return loads[-1]
    whole = worker_pb2.Load()
    whole.CopyFrom(loads[-1])
    del whole.ranks[:]
    whole.ranks.extend(ranks.values())
    return whole


def _step(steps: Sequence[worker_pb2.Step]) -> worker_pb2.Step:
    """One entry for each stream, where its first was."""
    entries: dict[int, tuple[int, list[int]]] = {}  # stream id → position, tokens
    logprobs: dict[int, list[TokenLogprobs]] = {}
    for step in steps:
        token_ids, start = list(step.token_ids), 0
        for stream_id, position, count in zip(step.stream_ids, step.positions, step.token_counts, strict=True):
            entries.setdefault(stream_id, (position, []))[1].extend(token_ids[start : start + count])
            start += count
        for one in step.logprobs:
            logprobs.setdefault(step.stream_ids[one.entry], []).extend(one.tokens)
    whole = worker_pb2.Step(
        stream_ids=entries,
        positions=[position for position, _ in entries.values()],
        token_counts=[len(token_ids) for _, token_ids in entries.values()],
        token_ids=[token for _, token_ids in entries.values() for token in token_ids],
    )
    for index, stream_id in enumerate(entries):
        if stream_id in logprobs:
            whole.logprobs.add(entry=index, tokens=logprobs[stream_id])
    return whole


def split(message: worker_pb2.WorkerMessage, streams_max: int) -> Sequence[worker_pb2.WorkerMessage]:
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
    cut = [worker_pb2.WorkerMessage(step=_part(step, start, start + streams_max, ends)) for start in cuts]
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
    message: worker_pb2.WorkerMessage, first: worker_pb2.WorkerMessage, last: worker_pb2.WorkerMessage
) -> None:
    """What is said before the tokens of a message to the first, what is said after them to the last."""
    first.begun.extend(message.begun)
    last.ends.extend(message.ends)
    for name, piece in (("welcome", first), ("load", first), ("goaway", last)):
        if message.HasField(name):
            getattr(piece, name).CopyFrom(getattr(message, name))
