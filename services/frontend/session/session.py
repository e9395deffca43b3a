"""The frontend's end of one session: all requests to one worker on one connection, and the proof that the worker lives.

| event on the session | what its streams get | the session |
| --- | --- | --- |
| cannot be opened, no welcome in time, or another worker's | – | CANNOT_CONNECT |
| the connection ends | DISCONNECTED | over |
| the same after the worker has said that it leaves | STREAM_INCOMPLETE; DRAINING where there are none | over |
| silence, an engine that stands still, or nothing taken of what we send | STALLED | over |
| a message that can't be read, or an item after `complete_final` | PROTOCOL_VIOLATION | over |
| an item of one stream that breaks the rules | PROTOCOL_VIOLATION, that stream | goes on |

A stream whose finish reason has come ends well, whatever happens to the session before `complete_final`.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

import structlog
from msgspec.structs import replace

from services.core.call import Call
from services.core.choice_group import Reservation
from services.core.common_layers import bug_failure
from services.core.errors import CAUSE, Failure, Reason
from services.core.interface import Sink
from services.core.model_card import ModelCard
from services.core.request import Request
from services.discovery.client import InstanceRecord
from services.frontend.routing.candidate import Candidate
from services.frontend.routing.capacity import FULL_S, had_place
from services.frontend.session.reader import ReadThrottle, SessionReader
from services.frontend.session.stream import Stream
from services.frontend.session.stream_table import StreamTable
from services.frontend.session.writer import CancelCounts, SessionWriter
from services.http.server.cork import Cork
from services.rpc.codec import card_from_wire, seconds_from_wire
from services.rpc.framing import FrameConnection
from services.rpc.step import read_entries
from services.runtime.address import split_address
from services.runtime.listen import bare_host
from services.stubs import worker_pb2

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSessionConfig:
    """connect_timeout_s: until the welcome. stall_s: silence that makes a worker with streams of ours a lost one.

    idle_stall_s: the same for one without. engine_stall_s: how long the step counter may stand still while sequences
    run; prefill_stall_s: the same while a prompt is being computed. full_s: how long a refusal for capacity counts,
    unless a load report comes or one of our own streams ends first.
    """

    connect_timeout_s: float = 2.0
    stall_s: float = 1.0
    idle_stall_s: float = 10.0
    engine_stall_s: float = 5.0
    prefill_stall_s: float = 60.0
    full_s: float = FULL_S


def _ignore(_: Candidate) -> None:
    """For a session outside a pool."""


class WorkerSession:
    """One session to one worker; it is opened by `run` and never opened again: a reconnect is a new session."""

    _numbers = count(1)

    def __init__(
        self,
        record: InstanceRecord,
        config: WorkerSessionConfig,
        on_change: Callable[[Candidate], None] = _ignore,
        cancels: CancelCounts | None = None,
        throttle: ReadThrottle | None = None,
        cork: Cork | None = None,
    ) -> None:
        """on_change: see `Candidate`."""
        loop = asyncio.get_running_loop()
        self._cancels = cancels or CancelCounts()
        self.record = record
        self.name = f"worker {record.instance_id}"
        self.key = f"{record.instance_id}#{next(self._numbers)}"
        self.candidate = Candidate(self, record.instance_id, full_s=config.full_s, on_change=on_change, clock=loop.time)
        self._card: ModelCard | None = None
        self._config = config
        self._clock = loop.time
        self._streams = StreamTable()
        self._reader = SessionReader(self._take, throttle or ReadThrottle(), cork or Cork())
        self._writer = SessionWriter(self._cancels)
        self._loss: Failure | None = None
        self._has_begun = asyncio.Event()
        self._has_ended = asyncio.Event()
        self._heard_at = self._stepped_at = self._clock()

    @property
    def card(self) -> ModelCard:
        """The worker's card, once welcome has come."""
        assert self._card is not None, "no welcome yet"
        return self._card

    def set_card(self, card: ModelCard) -> None:
        """Put the catalogue's own copy in the place of an equal one: route tells cards apart by identity."""
        assert card == self._card
        self._card = card

    @property
    def is_lost(self) -> bool:
        return self._loss is not None

    # Requests

    def open(self, request: Request, call: Call, sink: Sink) -> Stream:
        """Send the request. The caller awaits `ended` of what is returned and then closes it.

        The first choice of a party sends it for all of them, and each of the others joins the stream kept for it.
        """
        if self.is_lost:
            raise Failure(Reason.CANNOT_CONNECT, f"the session to {self.name} is over")
        if call.choice_group is None:
            stream = self._start(request, call)
        else:
            stream = self._streams.take(call.choice_group.claim(request.choice, partial(self._reserve, request, call)))
        stream.join(call.attempt, sink)
        return stream

    def _start(self, request: Request, call: Call, choices: int = 1) -> Stream:
        """Send it. Returns the first of so many streams with consecutive ids, for choices from the request's own on."""
        self._writer.submit(self._streams.next_id, request, call, choices)
        if not self._streams:
            self._heard_at = self._stepped_at = self._clock()  # An idle worker was allowed its silence.
        self.candidate.on_opened(choices)
        return self._streams.add(request, self.card.vocab_size, choices)

    def _reserve(self, request: Request, call: Call, count: int) -> Reservation:
        """A stream for each choice of the call's party, to be kept until that comes."""
        assert call.choice_group is not None
        assert count == call.choice_group.count, "route lets none go with a party that one has left"
        first = self._start(replace(request, choice=call.choice_group.first), call, count)
        ids = range(first.id, first.id + count)
        self._streams.keep(ids)
        return ids, self._give_back

    def _give_back(self, stream_id: int) -> None:
        """The choice never comes."""
        stream = self._streams.take(stream_id)
        if stream.ended.done():
            stream.ended.exception()
        self.close(stream)

    def close(self, stream: Stream) -> None:
        """Forget the stream, and tell the worker if it has not ended. Late tokens reach nobody."""
        if self._remove(stream, frees_room=True) and not self.is_lost:
            self._writer.cancel(stream.id)

    def _remove(self, stream: Stream, *, frees_room: bool) -> bool:
        """Whether it was there. frees_room: it had a slot or a place, which another request can have now."""
        if not self._streams.remove(stream):
            return False
        self.candidate.on_closed(frees_room=frees_room)
        return True

    # The connection

    async def run(self, on_welcome: asyncio.Event) -> None:
        """Open the session and keep it until it is lost; raises the Failure that says how."""
        connection = FrameConnection(worker_pb2.WorkerMessage, is_opener=True)
        try:
            await self._open(connection)
            on_welcome.set()
            await self._has_ended.wait()
            raise self._loss or AssertionError("lose sets both")
        finally:
            self.lose(Failure(Reason.DISCONNECTED, "the frontend closed the session"))
            connection.abort()

    async def _open(self, connection: FrameConnection[worker_pb2.WorkerMessage]) -> None:
        """Until the welcome. Raises CANNOT_CONNECT."""
        awaited = "connection to"
        try:
            host, port = split_address(self.record.sessions_at)
            async with asyncio.timeout(self._config.connect_timeout_s):
                await asyncio.get_running_loop().create_connection(lambda: connection, bare_host(host), port)
                awaited = "welcome from"
                self._reader.connect(connection)
                self._writer.connect(connection)
                connection.start(self)
                await self._has_begun.wait()
        except TimeoutError:
            detail = f"no {awaited} {self.name} within {self._config.connect_timeout_s:g} s"
            raise Failure(Reason.CANNOT_CONNECT, detail) from None
        except (OSError, ValueError) as error:  # ValueError: what the registry was told can't be the name of a host.
            why = getattr(error, "strerror", None) or error  # Of several addresses that failed there is none.
            raise Failure(Reason.CANNOT_CONNECT, f"{self.name} cannot be reached: {why}") from error
        if self._card is None:
            assert self._loss is not None, "it has begun, or is lost"
            why = self._loss.detail
            if self._loss.reason is Reason.PROTOCOL_VIOLATION:
                why = f"what it sent is no message of a session: is this the worker's session address? ({why})"
            raise Failure(Reason.CANNOT_CONNECT, f"no welcome: {why}") from self._loss

    def on_messages(self, messages: Sequence[worker_pb2.WorkerMessage]) -> None:
        """What the worker has said since the last time."""
        self._reader.add(messages)

    def _take(self, message: worker_pb2.WorkerMessage) -> bool:
        """Whether more is wanted. A worker is heard when its turn comes: what waits for it here is no silence."""
        self._heard_at = self._clock()
        try:
            if self._loss is None:
                self._on_message(message)
        except Failure as failure:
            self.lose(failure)
        except Exception as error:
            self.lose(bug_failure(error, f"(any) on the session to {self.name}"))
        return self._loss is None

    def on_writable(self) -> None:
        """The worker goes on to take what we send."""
        self._writer.send()

    def on_lost(self, failure: Failure) -> None:
        """The connection is over."""
        if self._card is None:  # Whoever opens it says so.
            self.lose(failure)
            return
        is_farewell = self.candidate.is_draining and failure.reason is Reason.DISCONNECTED
        if is_farewell and not self._streams:
            self.lose(Failure(Reason.DRAINING, f"{self.name} left as it had said"))
            return
        log.info("connection broke", worker=self.name, why=failure.detail)
        reason = Reason.STREAM_INCOMPLETE if is_farewell else failure.reason
        self.lose(Failure(reason, f"the connection to {self.name} broke"))

    # The worker's messages

    def _on_welcome(self, message: worker_pb2.WorkerMessage) -> None:
        if not message.HasField("welcome"):
            raise Failure(Reason.PROTOCOL_VIOLATION, f"{self.name} did not begin with a welcome")
        if (other := message.welcome.instance_id) != self.record.instance_id:  # Started there after it, as a rule.
            raise Failure(Reason.CANNOT_CONNECT, f"{self.name} is gone: worker {other} answers at its address")
        self._card = card_from_wire(message.welcome.card)
        self.candidate.on_welcome(message.welcome)
        self._has_begun.set()

    def _on_message(self, message: worker_pb2.WorkerMessage) -> None:
        if self._card is None:
            self._on_welcome(message)
        if message.HasField("load"):
            self._on_load(message.load)
        for stream_id in message.begun:
            if (stream := self._streams.get(stream_id)) is not None:
                stream.attempt.begin()
        if message.HasField("step"):
            self._on_step(message.step)
        for end in message.ends:
            self._on_end(end)
        if message.HasField("goaway"):
            self._on_goaway(seconds_from_wire(message.goaway.grace))

    def _on_load(self, load: worker_pb2.Load) -> None:
        if load.engine_steps != self.candidate.load.last.engine_steps:
            self._stepped_at = self._heard_at
        self.candidate.on_load(load)

    def _on_goaway(self, grace_s: float) -> None:
        self.candidate.on_draining()
        for stream in self._streams:
            try:
                stream.attempt.on_leaving(grace_s)
            except Exception as error:  # Nobody raises here: it is a bug, and must not harm the streams beside it.
                stream.fail(bug_failure(error, f"(any) on the session to {self.name}"))

    def _on_step(self, step: worker_pb2.Step) -> None:
        self._stepped_at = self._heard_at
        find = self._streams.find
        for stream_id, position, token_ids, logprobs in read_entries(step):
            if (stream := find(stream_id)) is not None:
                try:
                    stream.on_tokens(position, token_ids, logprobs)
                except Failure as failure:
                    self._drop(stream, failure)
            else:
                self._cancels.late_tokens += len(token_ids)

    def _on_end(self, end: worker_pb2.StreamEnd) -> None:
        stream = self._streams.find(end.stream_id)
        if stream is None:
            return
        try:
            stream.on_end(end)
        except Failure as failure:
            self._drop(stream, failure)
        is_failed = end.HasField("error")
        if end.complete_final or is_failed:
            frees_room = not is_failed or had_place(end.error.reason, end.error.metadata.get(CAUSE))
            self._remove(stream, frees_room=frees_room)
            self._streams.complete(stream)

    def _drop(self, stream: Stream, failure: Failure) -> None:
        log.warning("worker broke the protocol", instance=self.record.instance_id, why=str(failure))
        stream.fail(failure)
        self.close(stream)

    # Loss

    def check(self, now: float) -> float:
        """Take the worker for lost if it is silent, stands still or takes nothing for too long.

        Returns when that may be so next, if nothing happens until then.
        """
        self._writer.keep_alive(now)
        limit_s = self._config.stall_s if self._streams else self._config.idle_stall_s
        silent_at, stands_at, stuck_at = self._heard_at + limit_s, self._stands_at(), self._writer.stuck_at()
        if now >= silent_at:
            self.lose(Failure(Reason.STALLED, f"nothing heard from {self.name} for {limit_s} s"))
        elif now >= stands_at:
            self.lose(Failure(Reason.STALLED, f"the engine of {self.name} stands still"))
        elif now >= stuck_at:
            self.lose(Failure(Reason.STALLED, f"{self.name} takes nothing of what is sent to it"))
        return math.inf if self.is_lost else min(silent_at, stands_at, stuck_at)

    def _stands_at(self) -> float:
        """When its engine has made no step for too long: later where it computes a prompt, or does not say."""
        if not (self._streams and self.candidate.load.last.running):
            return math.inf
        ranks = self.candidate.load.last.ranks
        may_prefill = not ranks or any(rank.active_prefill_tokens for rank in ranks)
        return self._stepped_at + (self._config.prefill_stall_s if may_prefill else self._config.engine_stall_s)

    def forgive(self, now: float) -> None:
        """The frontend itself was late: silence until now proves nothing."""
        self._heard_at = self._stepped_at = now

    def lose(self, failure: Failure) -> None:
        """The session is over: every stream on it fails at once. Idempotent."""
        if self._loss is not None:
            return
        self._loss = failure
        self._has_begun.set()
        self._has_ended.set()
        self.candidate.on_lost()
        for stream in self._streams:
            self._streams.remove(stream)
            stream.fail(failure)
