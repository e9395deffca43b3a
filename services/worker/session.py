"""The worker's end of one session: all requests of one frontend on one connection.

Every request is one call of the worker's pipeline in a task of its own. Its tokens go to the outbox of the session,
which becomes one message whenever the frontend is ready to read one. All tasks belong to one task group: when the
session ends, every request ends, except the generations, which `OwnedStreams` lets go of.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import structlog
from msgspec.structs import replace

from services.core.call import Attempt, Call, Cause, Ending, Phase
from services.core.choice_group import ChoiceGroup
from services.core.errors import Failure, Reason
from services.core.interface import Delta, Finish, Layer
from services.core.request import Request
from services.core.tenant import EVERYBODY, Tenant
from services.core.validation import CHOICES_MAX, COUNT_MAX
from services.rpc.codec import request_from_wire, seconds_from_wire, tenant_from_wire
from services.rpc.framing import FrameConnection
from services.rpc.inference_service import request_id_of
from services.stubs import worker_pb2
from services.worker.counters import Counters
from services.worker.execute import ATTACH
from services.worker.generations.generation import Spec
from services.worker.generations.owned import OwnedStreams, spec_of
from services.worker.generations.store import DetachConfig, GenerationStore
from services.worker.outbox import Outbox

log = structlog.get_logger()

ENDED_KEPT = 16_384
"""How many ids of ended streams a session remembers, to count a cancel that crosses its stream's end exactly once."""

SILENCE_S_MAX = 15.0
"""A frontend that is silent for longer is gone: it sends something at least every 5 s (KEEPALIVE_S of the frontend)."""

STREAMS_MAX = 16_384
"""How many streams and open questions a session may have beyond the worker's limits. Each stream is a task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendSessionConfig:
    """`heartbeat_s`: the longest silence while the worker has requests, and until it has reported that it has none.

    `idle_heartbeats`: the longest silence otherwise, in heartbeats. `outbox_tokens_max`: how much a frontend may leave
    unread before its session is dropped; see `Outbox.token_count`. `migration_limit`: see `RoutedSession`. `detach`: of
    the whole worker.
    """

    heartbeat_s: float = 0.25
    idle_heartbeats: int = 8
    outbox_tokens_max: int = 262_144
    migration_limit: int | None = None
    detach: DetachConfig = field(default_factory=DetachConfig)


class SessionOverError(Exception):
    """Ends the task group of a session. The message says why."""


class _Stream(Attempt):
    """One stream of a session, from its submit to its end: the attempt of its call, and the sink of its request.

    `choice`: its number in the request. `ending`: that of its call. `has_started`: whether its task has run.
    """

    __slots__ = ("_outbox", "choice", "choice_group", "ending", "has_started", "id", "task")

    def __init__(self, stream_id: int, choice: int, choice_group: ChoiceGroup | None, outbox: Outbox) -> None:
        super().__init__()
        self.id = stream_id
        self.choice = choice
        self.choice_group = choice_group
        self.ending = Ending()
        self.has_started = False
        self.task: asyncio.Task[None] | None = None
        self._outbox = outbox

    def on_begun(self) -> None:
        self._outbox.add_begun(self.id)

    def deliver(self, delta: Delta) -> None:
        self._outbox.add_tokens(self.id, delta)


class FrontendSession:
    """The worker's end of one session."""

    def __init__(
        self,
        pipeline: Layer,
        welcome: worker_pb2.Welcome,
        load: Callable[[], worker_pb2.Load],
        has_requests: Callable[[], bool],
        counters: Counters,
        generations: GenerationStore,
        config: FrontendSessionConfig,
    ) -> None:
        self._pipeline = pipeline
        self._load = load
        self._has_requests = has_requests
        self._counters = counters
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._connection: FrameConnection[worker_pb2.FrontendMessage] | None = None
        self._is_send_due = False
        self._silent_beats = 0  # Heartbeats since the last message of the frontend.
        self._owes_load = False  # There were requests at the last report or since, or ends are not sent yet.
        self._error: Exception | None = None  # What ends the session.
        self._is_over = asyncio.Event()
        self._outbox = Outbox(self._on_outbox)
        self._outbox.set_welcome(welcome)
        self._outbox.set_load(load())
        self._streams_max = welcome.engine_request_limit + welcome.request_queue_limit + STREAMS_MAX
        self._streams: dict[int, _Stream] = {}
        self._owned = OwnedStreams(generations, self._outbox, counters, self._note_ended)
        # Ids of ended streams, oldest first: a cancel may still arrive. An OrderedDict, because a dict that often loses
        # its first key takes ever longer to find the next.
        self._ended: OrderedDict[int, None] = OrderedDict()
        self._is_leaving = False
        self._has_ended = False

    def goaway(self, grace_s: float) -> None:
        """Tell the frontend that the worker leaves within `grace_s`."""
        self._is_leaving = True
        self._outbox.set_load(self._load())  # The frontend decides by it whether to stay.
        self._outbox.set_goaway(grace_s)

    def end(self) -> None:
        """Send what is left, then end the session."""
        self._has_ended = True
        self._send_soon()

    async def serve(self, connection: FrameConnection[worker_pb2.FrontendMessage]) -> None:
        """Serve the frontend until it hangs up or the session must be dropped. No request outlives the call."""
        try:
            async with asyncio.TaskGroup() as self._group:
                self._group.create_task(self._beat())
                self._connection = connection
                self._send_soon()
                connection.start(
                    on_messages=self._on_messages, on_writable=self._send_soon, on_lost=self._on_connection_lost
                )
                await self._is_over.wait()
                raise self._error or AssertionError("_end_with sets both")
        except* SessionOverError as over:
            log.info("session over", why=str(over.exceptions[0]), peer=connection.peer)
        finally:
            self._owned.detach_all()
            if self._has_ended:
                connection.close()
            else:
                connection.abort()

    def _on_messages(self, messages: Sequence[worker_pb2.FrontendMessage]) -> None:
        """Called with the messages of one read."""
        self._silent_beats = 0
        if self._is_over.is_set():
            return
        try:
            for message in messages:
                if message.reads_logprob_columns:
                    self._outbox.has_columns = True
                for submit in message.submits:
                    self._submit(submit)
                for stream_id in message.cancels:
                    self._cancel(stream_id)
                self._on_generations(message)
        except Exception as error:
            self._end_with(error)

    def _on_generations(self, message: worker_pb2.FrontendMessage) -> None:
        """Process the parts of a message that only generations have."""
        for stream_id in message.stops:
            self._owned.stop(stream_id)
        for stream_id in message.detaches:
            self._owned.detach(stream_id)
        for locate in message.locates:
            self._check_room(1)
            self._owned.locate(locate)
        for adopt in message.adopts:
            self._check_room(1)
            self._check_new(adopt.stream_id)
            self._owned.adopt(adopt)
        if message.locates or message.adopts:
            self._send_soon()

    def _on_connection_lost(self, failure: Failure) -> None:
        if failure.reason is Reason.PROTOCOL_VIOLATION:
            why = f"the frontend broke the protocol: {failure.detail}"
        else:
            why = "this worker leaves" if self._is_leaving else "the frontend closed it, or is gone"
        self._end_with(SessionOverError(why))

    def _end_with(self, error: Exception) -> None:
        self._error = self._error or error
        self._is_over.set()

    # Sending

    def _on_outbox(self) -> None:
        if self._outbox.token_count > self._config.outbox_tokens_max:
            why = f"the frontend left more than {self._config.outbox_tokens_max} tokens unread"
            self._end_with(SessionOverError(why))
        self._send_soon()

    def _send_soon(self) -> None:
        """Send in the turn after the next: a request ends one turn after its last token, and both travel together."""
        if not self._is_send_due and self._connection is not None:
            self._is_send_due = True
            self._loop.call_soon(self._loop.call_soon, self._send)

    def _send(self) -> None:
        """Send everything, if the frontend is ready to read. Otherwise it stays in the outbox, which has a bound."""
        self._is_send_due = False
        assert self._connection is not None
        if self._connection.is_writable:
            if not self._outbox.is_empty:
                self._connection.send(self._outbox.pop_message())
            self._owned.pull()  # Into the empty outbox, which is sent in a later turn.
            if self._has_ended and self._outbox.is_empty:
                self._end_with(SessionOverError("this worker left"))

    # Requests

    def _submit(self, submit: worker_pb2.Submit) -> None:
        """Start a stream for each choice. The request is decoded once."""
        asked, first_id, count = submit.request, submit.stream_id, max(submit.choices, 1)
        first_choice = asked.choice
        if count > CHOICES_MAX:
            raise SessionOverError(f"the frontend asked for {count} choices at once: at most {CHOICES_MAX}")
        if max(first_id, first_choice) + count - 1 > COUNT_MAX:
            raise SessionOverError(f"the frontend counted {count} choices or their ids past {COUNT_MAX}")
        self._check_room(count)
        for number in range(count):
            self._check_new(first_id + number)
        deadline = None
        if submit.HasField("timeout"):
            deadline = self._loop.time() + seconds_from_wire(submit.timeout)
        self._owes_load = True
        request_id, (request, spec, tenant) = asked.request_id, _read(submit, count)
        if spec is not None and isinstance(request, Request):
            call = Call(request_id=request_id_of(request_id), deadline=deadline, tenant=tenant)
            self._owned.submit(first_id, spec, request, call, count)
            return
        choice_group = ChoiceGroup(count, first_choice) if count > 1 else None
        for number in range(count):
            stream = _Stream(first_id + number, first_choice + number, choice_group, self._outbox)
            self._streams[stream.id] = stream
            stream.task = self._group.create_task(self._run(stream, request, request_id, deadline, tenant))
            stream.task.add_done_callback(partial(self._forget, stream))

    def _check_room(self, count: int) -> None:
        if len(self._streams) + len(self._owned) + self._owned.question_count + count > self._streams_max:
            raise SessionOverError(f"the frontend has more than {self._streams_max} streams and questions")

    def _check_new(self, stream_id: int) -> None:
        if stream_id in self._streams or stream_id in self._owned or stream_id in self._ended:
            raise SessionOverError(f"the frontend used stream id {stream_id} twice")

    async def _run(
        self, stream: _Stream, request: Request | Failure, request_id: str, deadline: float | None, tenant: Tenant
    ) -> None:
        stream.has_started = True
        try:
            call = Call(
                request_id=request_id_of(request_id),
                tenant=tenant,
                deadline=deadline,
                endpoint=ATTACH,
                attempt=stream,
                ending=stream.ending,
                choice_group=stream.choice_group,
            )
            if isinstance(request, Failure):
                raise request.copy()
            if stream.choice_group is not None:
                request = replace(request, choice=stream.choice)
            finish: Finish = await self._pipeline(request, call, stream)
            self._outbox.add_finish(stream.id, finish.reason)
        except Failure as failure:
            self._outbox.add_failure(stream.id, failure)
        stream.phase = Phase.ENDED

    def _cancel(self, stream_id: int) -> None:
        """Cancel the stream. Each cancelled stream is counted once, whether it was still running or had ended."""
        if stream_id in self._owned:
            self._owned.cancel(stream_id)
        elif (stream := self._streams.get(stream_id)) is not None:
            if stream.ending.cause is not Cause.SIGNAL:
                stream.ending.cause = Cause.SIGNAL
                self._counters.cancelled[Cause.SIGNAL, stream.phase] += 1
                assert stream.task is not None
                stream.task.cancel()
        elif stream_id in self._ended:
            del self._ended[stream_id]
            self._counters.cancelled[Cause.SIGNAL, Phase.ENDED] += 1

    def _forget(self, stream: _Stream, _: asyncio.Task[None]) -> None:
        """The task of the stream is done, or was cancelled before it started."""
        del self._streams[stream.id]
        if stream.choice_group is not None:
            stream.choice_group.leave(stream.choice)
        if stream.ending.cause is Cause.SIGNAL:
            return  # It has been counted, and no further cancel will come.
        if not stream.has_started:
            self._counters.cancelled[Cause.SESSION_LOST, Phase.QUEUED] += 1
        self._note_ended(stream.id)

    def _note_ended(self, stream_id: int) -> None:
        self._ended[stream_id] = None
        if len(self._ended) > ENDED_KEPT:
            self._ended.popitem(last=False)

    # Heartbeats

    async def _beat(self) -> None:
        """Report the load at every heartbeat while the worker has requests, of any frontend, and once more after them.

        Otherwise report it every `idle_heartbeats` heartbeats.
        """
        beats = 0
        while True:
            await asyncio.sleep(self._config.heartbeat_s)
            beats += 1
            self._silent_beats += 1  # Not by the clock: a worker that stood still could hear nothing.
            if self._silent_beats * self._config.heartbeat_s > SILENCE_S_MAX:
                self._end_with(SessionOverError(f"the frontend was silent for {SILENCE_S_MAX:g} s"))
            has_requests = bool(self._streams or self._has_requests())
            if has_requests or self._owes_load or beats % self._config.idle_heartbeats == 0:
                self._outbox.set_load(self._load())
            # Report once more after the last request has ended, however short it was. Otherwise its frontend takes the
            # worker for loaded, and then for unknown. A load that travels with ends does not count: the frontend reads
            # it before them.
            self._owes_load = has_requests or self._outbox.has_ends


def _read(submit: worker_pb2.Submit, count: int) -> tuple[Request | Failure, Spec | None, Tenant]:
    """The request, or the failure that says why it cannot be honoured; its generation, if it has one; its tenant."""
    try:
        tenant = tenant_from_wire(submit.tenant) if submit.HasField("tenant") else EVERYBODY
        request = request_from_wire(submit.request)
        spec = spec_of(submit.generation, request, count) if submit.HasField("generation") else None
        return request, spec, tenant
    except Failure as failure:
        return failure, None, EVERYBODY
