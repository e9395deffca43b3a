"""The streams of one session: opened for requests, fed by the worker's messages, closed by either end."""

import asyncio
import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import structlog
from msgspec.structs import replace

from services.core.call import Call
from services.core.choice_group import Reservation
from services.core.common_layers import bug_failure
from services.core.errors import CAUSE, Failure, Reason
from services.core.interface import Sink
from services.core.request import Request
from services.frontend.routing.candidate import Candidate
from services.frontend.routing.capacity import had_place
from services.frontend.session.stream import Stream
from services.frontend.session.writer import CancelCounts, SessionWriter
from services.rpc.step import read_entries
from services.stubs import worker_pb2

log = structlog.get_logger()

COMPLETED_KEPT = 4096
"""How many completed stream ids a session remembers, to notice items that follow `complete_final`."""
COMPLETION_S_MAX = 2.0
"""How long a stream that has its finish reason waits for `complete_final`; then it ends well without it."""
ADOPTION_S_MAX = 5.0
"""How long an adopted stream waits for the next part of what the worker has of it, as it said itself; then it fails."""


@dataclass(slots=True)
class _Adoption:
    """What is still to come of an adopted record.

    `end`: the position after its last token. `is_over`: it has ended, so its end is to come too. `position`: of the
    stream, since the event-loop time `since`.
    """

    stream: Stream
    end: int
    is_over: bool
    position: int
    since: float

    @property
    def is_awaited(self) -> bool:
        return self.stream.position < self.end or self.is_over


class StreamTable:
    """The streams of one session by id. Ids are assigned in order and never reused."""

    def __init__(self, writer: SessionWriter, candidate: Candidate, cancels: CancelCounts) -> None:
        """`candidate`: the worker as routing sees it. It is notified when streams open and close."""
        self._writer = writer
        self._candidate = candidate
        self._cancels = cancels
        self._loop = asyncio.get_running_loop()
        self._open: dict[int, Stream] = {}
        self._reserved: dict[int, Stream] = {}  # Streams of choices that have not joined yet. They may have ended.
        self._finished: dict[int, float] = {}  # Id → when the finish came, until `complete_final` does. Oldest first.
        self._adoptions: dict[int, _Adoption] = {}
        self._completed: OrderedDict[int, None] = OrderedDict()  # Ids that the worker has ended, oldest first.
        self._next_id = 1

    def __len__(self) -> int:
        """The number of open streams."""
        return len(self._open)

    @property
    def is_done(self) -> bool:
        """Whether no stream is open, and none waits for a choice that has not joined it yet."""
        return not self._open and not self._reserved

    @property
    def has_unfinished(self) -> bool:
        """Whether the worker has something to do: a stream is open that has no finish reason yet."""
        return len(self._open) > len(self._finished)

    # Requests

    def open(self, request: Request, call: Call, sink: Sink, vocab_size: int) -> Stream:
        """Send the request. Its tokens go to `sink`; await `ended` of the stream, then close it.

        The first choice of a group sends the request for all its choices and reserves a stream for each of the others.
        Raises INVALID_ARGUMENT for a request that is too large to send.
        """
        if call.choice_group is None:
            stream = self._start(request, call, vocab_size)
        else:
            reserve = partial(self._reserve, request, call, vocab_size)
            stream = self._reserved.pop(call.choice_group.claim(request.choice, reserve))
        stream.join(call.attempt, sink)
        return stream

    def _start(self, request: Request, call: Call, vocab_size: int, choices: int = 1) -> Stream:
        """Send the request for its own choice and the `choices - 1` that follow. Returns the first of their streams.

        The streams have consecutive ids.
        """
        first_id = self._next_id
        self._writer.submit(first_id, request, call, choices)
        self._candidate.on_opened(choices, call.tenant)
        self._next_id += choices
        for number in range(choices):
            one = replace(request, choice=request.choice + number) if number else request
            stream_id, ended = first_id + number, self._loop.create_future()
            self._open[stream_id] = Stream(stream_id, one, vocab_size, ended, call.tenant)
        return self._open[first_id]

    def _reserve(self, request: Request, call: Call, vocab_size: int, count: int) -> Reservation:
        """Open a stream for each choice of the call's group."""
        assert call.choice_group is not None
        assert count == call.choice_group.count, "route sends no group that a choice has left"
        first = self._start(replace(request, choice=call.choice_group.first), call, vocab_size, count)
        ids = range(first.id, first.id + count)
        self._reserved |= {stream_id: self._open[stream_id] for stream_id in ids}
        return ids, self._give_back

    def _give_back(self, stream_id: int) -> None:
        """Close a reserved stream whose choice never comes."""
        stream = self._reserved.pop(stream_id)
        if stream.ended.done():
            stream.ended.exception()  # Or asyncio would report it as never retrieved.
        self.close(stream)

    def adopt(self, request: Request, call: Call, sink: Sink, vocab_size: int) -> Stream:
        """Take over a generation that the worker has. The stream gets it from the request's own tokens on."""
        assert call.kept is not None, "only kept answers can be adopted"
        assert call.attempt.adopts is not None, "Route sets what is adopted"
        kept, copy, stream_id = call.kept, call.attempt.adopts, self._next_id
        self._next_id += 1
        self._writer.adopt(stream_id, kept.generation.id, kept.index_of(request.choice), kept.generation.epoch)
        self._candidate.on_opened(1, call.tenant)
        ended = self._loop.create_future()
        stream = self._open[stream_id] = Stream(stream_id, request, vocab_size, ended, call.tenant)
        stream.join(call.attempt, sink)
        begin = stream.position
        adoption = _Adoption(stream, begin + copy.token_count, copy.is_over, begin, self._loop.time())
        if adoption.is_awaited:
            self._adoptions[stream_id] = adoption
        return stream

    def discard(self, generation_id: bytes, index: int, epoch: int) -> None:
        """Take over a generation that is not needed, and cancel it."""
        stream_id = self._next_id
        self._next_id += 1
        self._writer.adopt(stream_id, generation_id, index, epoch)
        self._writer.cancel(stream_id)

    def stop(self, stream: Stream) -> None:
        """The stream needs no more tokens, though the worker keeps its record."""
        self._writer.stop(stream.id)
        self._remove(stream, frees_room=True)

    def let_go(self, stream: Stream) -> None:
        """Leave the stream to other frontends, whether it has ended or not."""
        self._remove(stream, frees_room=False)  # Its request goes on.
        self._writer.let_go(stream.id)

    def close(self, stream: Stream, *, has_record: bool = False) -> None:
        """Forget the stream; cancel it if the worker has not ended it, or `has_record` of it. Late tokens are dropped.

        Idempotent, unless the worker has a record.
        """
        if self._remove(stream, frees_room=True) or (has_record and stream.is_complete):
            self._writer.cancel(stream.id)

    def _remove(self, stream: Stream, *, frees_room: bool) -> bool:
        """Remove an open stream. Returns False if it is not open. `frees_room`: it had a slot or a queue place."""
        if self._open.pop(stream.id, None) is None:
            return False
        self._finished.pop(stream.id, None)
        self._adoptions.pop(stream.id, None)
        self._candidate.on_closed(frees_room=frees_room, tenant=stream.tenant)
        return True

    # The worker's messages

    def on_begun(self, stream_ids: Iterable[int]) -> None:
        """The engine has the requests of these streams."""
        for stream_id in stream_ids:
            if (stream := self._open.get(stream_id)) is not None:
                stream.attempt.begin()

    def on_step(self, step: worker_pb2.Step) -> None:
        """Deliver tokens. Raises PROTOCOL_VIOLATION if the step is malformed or a stream had been completed."""
        find = self._find
        for stream_id, position, token_ids, logprobs in read_entries(step):
            if (stream := find(stream_id)) is not None:
                try:
                    stream.on_tokens(position, token_ids, logprobs)
                except Failure as failure:
                    self._fail(stream, failure)
            else:
                self._cancels.late_tokens += len(token_ids)

    def on_end(self, end: worker_pb2.StreamEnd) -> None:
        """End a stream. Raises PROTOCOL_VIOLATION if it had been completed."""
        stream = self._find(end.stream_id)
        if stream is None:
            return
        try:
            stream.on_end(end)
        except Failure as failure:
            self._fail(stream, failure)
        is_failed = end.HasField("error")
        if end.complete_final or is_failed:
            frees_room = not is_failed or had_place(end.error.reason, end.error.metadata.get(CAUSE))
            self._remove(stream, frees_room=frees_room)
            self._complete(stream.id)
        elif stream.id in self._open:
            self._finished[stream.id] = self._loop.time()

    def check(self, now: float) -> float:
        """End the streams that have waited for too long. Returns the time at which the next one has."""
        return min(self._check_finished(now), self._check_adopted(now))

    def forgive(self, now: float) -> None:
        """Ignore how long adopted records have not come until `now`."""
        for adoption in self._adoptions.values():
            adoption.since = now

    def _check_adopted(self, now: float) -> float:
        """Fail the adopted streams of which nothing has come for ADOPTION_S_MAX, though the worker has more."""
        limit_at = math.inf
        for stream_id, adoption in list(self._adoptions.items()):
            stream = adoption.stream
            if not adoption.is_awaited:
                del self._adoptions[stream_id]
                continue
            if stream.position > adoption.position:
                adoption.position, adoption.since = stream.position, now
            if now >= adoption.since + ADOPTION_S_MAX:
                why = f"the worker has not sent what it has of the answer within {ADOPTION_S_MAX:g} s"
                self._fail(stream, Failure(Reason.STALLED, why))
            else:
                limit_at = min(limit_at, adoption.since + ADOPTION_S_MAX)
        return limit_at

    def _check_finished(self, now: float) -> float:
        """End the streams that have waited for `complete_final` for COMPLETION_S_MAX: they have all their tokens."""
        while self._finished:
            stream_id, finished_at = next(iter(self._finished.items()))
            if now < finished_at + COMPLETION_S_MAX:
                return finished_at + COMPLETION_S_MAX
            log.warning(
                "stream finished without complete_final", instance=self._candidate.instance_id, stream_id=stream_id
            )
            self._open[stream_id].complete()
            self.close(self._open[stream_id])
        return math.inf

    def on_goaway(self, grace_s: float) -> None:
        """Tell each open stream that the worker leaves within `grace_s`."""
        for stream in list(self._open.values()):
            try:
                stream.attempt.on_leaving(grace_s)
            except Exception as error:  # A bug of one request must not harm the others.
                stream.fail(bug_failure(error, f"(any) on the session to worker {self._candidate.instance_id}"))

    def fail_all(self, failure: Failure) -> None:
        """The session is lost: fail and forget all open streams."""
        streams, self._open, self._finished, self._adoptions = self._open, {}, {}, {}
        for stream in streams.values():
            stream.fail(failure)

    def _find(self, stream_id: int) -> Stream | None:
        """The open stream; None if this end has closed it. Raises PROTOCOL_VIOLATION if the worker had completed it."""
        stream = self._open.get(stream_id)
        if stream is None and stream_id in self._completed:
            raise Failure(Reason.PROTOCOL_VIOLATION, f"the worker went on with stream {stream_id} after its end")
        return stream

    def _fail(self, stream: Stream, failure: Failure) -> None:
        """The worker broke the protocol on this stream. The others go on."""
        log.warning("worker broke the protocol", instance=self._candidate.instance_id, why=str(failure))
        stream.fail(failure)
        self.close(stream)

    def _complete(self, stream_id: int) -> None:
        self._completed[stream_id] = None
        if len(self._completed) > COMPLETED_KEPT:
            self._completed.popitem(last=False)
