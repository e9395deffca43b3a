"""A streamed answer as server-sent events, written from the sink directly to the socket.

| state | event | next state |
| --- | --- | --- |
| waiting | a delta with an event | open |
| waiting | a delta without an event | waiting |
| waiting | a delta with an event, the client is gone | left |
| waiting | a pause | open |
| waiting | a pause, the client is gone | waiting |
| open | a delta | open |
| open | too much is unsent | slow |
| open | a delta, the client is gone | left |
| open | a pause | open |
| slow | a delta, too much is unsent | slow |
| slow | a delta, nothing is buffered any more | open |
| slow | a delta, the client is gone | left |
| slow | the client passes a bound | left |
| slow | a pause, too much is unsent | slow |
| slow | a pause, nothing is buffered any more | open |
| left | a delta | left |
| left | a pause | left |

While the stream is waiting, nothing is sent; while it is slow, deltas go to a backlog. When it becomes `left`, the
request is failed from outside, and nothing more is sent. A pause adds a comment to an open stream whose client has
taken everything; what is slow or unsent needs none.
"""

from collections.abc import Callable

import structlog

from services.core.call import Call, Cause, Ending, Told
from services.core.common_layers import bug_failure, outcome_of
from services.core.errors import Failure, Reason
from services.core.generation.kept import Generation, Kept
from services.core.generation.replay import ReplayRoom
from services.core.interface import Delta, Finish, Layer
from services.core.request import Request
from services.frontend.api.openai.responses import Answer
from services.frontend.api.openai.sse.backlog import Backlog
from services.frontend.api.openai.sse.events import Events, events_of
from services.frontend.api.openai.sse.keepalive import Keepalive
from services.frontend.api.openai.sse.kept_events import events_for
from services.frontend.api.response_headers import allowance_headers, told_headers
from services.http.errors import envelope, error_response
from services.http.request_id import REQUEST_ID
from services.http.server.config import HttpConfig
from services.http.server.exchange import Exchange
from services.http.server.messages import HttpRequest, last_chunk, stream_fields
from services.models.tokenizers import Vocabulary

log = structlog.get_logger()

EVENTS_TYPE = "text/event-stream; charset=utf-8"

NameFields = Callable[[Failure], None]
"""See Body.name_fields. Called only if the request fails."""


class SseStream:
    """The sink of one streamed answer, and its response. Its states are in the table of the module.

    The response begins with the first event, so that a failure before it gets an HTTP status of its own. The head is
    sent together with the first event, and the last event together with the end of the body. With `sse_keepalive_s`, a
    comment is sent in each pause; the first one begins the response if it comes before the first event.
    """

    __slots__ = (
        "_answer",
        "_at_end",
        "_backlog",
        "_config",
        "_ending",
        "_events",
        "_events_of",
        "_exchange",
        "_generation",
        "_has_begun",
        "_http_request",
        "_is_chunked",
        "_is_gone",
        "_is_open",
        "_keepalive",
        "_left",
        "_room",
        "_send",
        "_told",
        "_vocabulary",
    )

    _events: Events  # Set with the request, and so is `_events_of`.
    _events_of: Callable[[Delta], bytes]

    def __init__(
        self,
        http_request: HttpRequest,
        exchange: Exchange,
        answer: Answer,
        config: HttpConfig,
        vocabulary: Callable[[], Vocabulary],
    ) -> None:
        """`vocabulary`: returns the model's vocabulary, for log probabilities."""
        self._http_request = http_request
        self._exchange = exchange
        self._answer = answer
        self._config = config
        self._is_chunked = http_request.is_chunkable
        self._vocabulary = vocabulary
        self._generation: Generation | None = None
        self._is_open = self._has_begun = False
        self._send = exchange.send
        self._is_gone = exchange.is_closing
        self._at_end = b""
        self._backlog: Backlog | None = None
        self._keepalive: Keepalive | None = None
        self._ending = Ending()
        self._told = Told()
        self._left: Reason | None = None
        self._room = ReplayRoom({})

    @property
    def state(self) -> str:
        """The state, by its name in the table."""
        if self._left is not None:
            return "left"
        if not self._has_begun:
            return "waiting"
        return "open" if self._is_open else "slow"

    def deliver(self, delta: Delta) -> None:
        if not self._is_open:
            self._deliver_unless_open(delta)
        elif event := self._events_of(delta):  # Every token takes this path.
            if self._is_gone():
                self._leave_gone()
            elif delta.usage is not None:
                self._at_end = event
            else:
                self._send(event)

    def _deliver_unless_open(self, delta: Delta) -> None:
        if self._left is not None:
            return
        if not self._has_begun:
            if event := self._events_of(delta):
                self._begin(event, is_last=delta.usage is not None)
        elif self._is_gone():
            self._leave_gone()
        else:
            assert self._backlog is not None
            self._backlog.deliver(delta)
            self._open_if_caught_up(self._backlog)

    def _open_if_caught_up(self, backlog: Backlog) -> None:
        if backlog.is_caught_up:
            backlog.stop()
            self._is_open = True

    def _on_pause(self) -> None:
        """Send a comment, unless the client is gone, or has not taken what was sent before, or the answer is ending."""
        if self._left is not None or self._is_gone() or self._exchange.unsent_size() or self._at_end:
            return
        if not self._has_begun:
            self._begin(self._events.comment(), is_last=False)
            return
        if not self._is_open:
            assert self._backlog is not None
            self._open_if_caught_up(self._backlog)
        if self._is_open:
            self._send(self._events.comment())

    async def serve(self, pipeline: Layer, request: Request, call: Call, name_fields: NameFields) -> None:
        """Run the request and send its answer. Raises only CancelledError.

        If the client is too slow or gone, the request is failed from outside, so that every layer, the one that counts
        outcomes included, sees the reason.
        """
        self._prepare(request, call)
        try:
            outcome = await outcome_of(pipeline, request, call, self)
        except Exception as error:
            outcome = bug_failure(error, call.request_id)
        finally:
            self._exchange.on_full = self._exchange.on_evicted = None
            self._stop_backlog()
            if self._keepalive is not None:
                self._keepalive.stop()
            if self._generation is not None:
                self._generation.on_begun = None  # Break the cycle: it need not wait for the garbage collector.
        try:
            if self._left is None:
                last = self._end_of(outcome, name_fields)
                await self._exchange.finish(last, self._config.client, self._answer.request_id)
            elif self._left is Reason.SLOW_CLIENT:
                self._abort()
        except Exception as error:
            self._exchange.cut()
            bug_failure(error, call.request_id)
        self._backlog = None  # Break cycles: what waited need not wait for the garbage collector, too.
        if isinstance(outcome, Failure):
            outcome.clear_tracebacks()

    def _prepare(self, request: Request, call: Call) -> None:
        self._ending, self._told = call.ending, call.told
        if call.kept is None:
            self._events = events_of(self._answer, self._vocabulary, is_chunked=self._is_chunked)
            self._events_of = self._events.of
        else:
            self._keep(call.kept, request, call.ending)
        if (pause_s := self._config.sse_keepalive_s) is not None:
            self._keepalive = Keepalive(pause_s, self._on_pause)
            self._events_of = self._keepalive.noting(self._events_of)

    def _keep(self, kept: Kept, request: Request, ending: Ending) -> None:
        """Send the events of an answer that can be resumed, or is."""
        events = events_for(self._answer, self._vocabulary, request, kept, ending, is_chunked=self._is_chunked)
        self._events, self._events_of, self._generation = events, events.of, kept.generation
        if kept.generation.is_resumed:
            self._room = ReplayRoom(kept.generation.record_ends)
            self._events_of = self._room.noting(events.of)
        if kept.cursor is None:  # With one, the answer may still be refused.
            kept.generation.on_begun = self._begin_early

    def _begin_early(self) -> None:
        """The engine has begun: tell the client by which id it can come back."""
        if not self._has_begun and self._left is None:
            self._begin(b"", is_last=False)

    def _stop_backlog(self) -> None:
        if self._backlog is not None:
            self._backlog.stop()

    def _begin(self, event: bytes, *, is_last: bool) -> None:
        """Send the head and the first event or comment. `is_last`: keep both, to send them together with the end."""
        if self._is_gone():
            self._leave_gone()
            return
        head = self._head()
        self._has_begun = self._is_open = True
        if is_last:
            self._at_end = head + event
            return
        self._exchange.on_full, self._exchange.on_evicted = self._become_slow, self._leave_slow
        self._send(head + event)

    def _head(self) -> bytes:
        if self._generation is not None:
            self._generation.is_told = True
        request = self._http_request
        more = {REQUEST_ID: request.id, **request.shared, **told_headers(self._told)}
        return self._exchange.begin_stream(request, stream_fields(EVENTS_TYPE, more))

    def _become_slow(self) -> None:
        """Too much is unsent: deliver to a backlog until the client has caught up."""
        if not self._is_open:
            return  # The backlog writes as well, and may fill the transport again.
        self._is_open = False
        self._backlog = Backlog(self._exchange, self._events_of, self._config.client, self._leave_slow, self._room)

    def _end_of(self, outcome: Finish | Failure, name_fields: NameFields) -> bytes:
        """The last bytes: the end of the stream, or an error response if the stream has not begun."""
        if isinstance(outcome, Failure):
            name_fields(outcome)
            last = self._failed(outcome)
            outcome.clear_tracebacks()
            return last
        assert outcome.usage is not None, "the detokenize layer sets usage"
        head = b"" if self._has_begun else self._head()  # The client has all events of a resumed answer already.
        return head + self._at_end + self._rest() + self._last(self._events.ending(outcome.usage))

    def _failed(self, failure: Failure) -> bytes:
        if self._has_begun:
            error = envelope(failure, self._answer.request_id)
            event = self._events.failed(error, is_final=not failure.traits.retryable)
            return self._at_end + self._rest() + self._last(event)
        response = error_response(failure, self._answer.request_id, overload_status=self._config.overload_status)
        response.headers |= allowance_headers(self._told.allowances)
        return self._exchange.encode(response, self._http_request)

    def _rest(self) -> bytes:
        """What the backlog still holds. It is within the bound, so it is written whether there is room or not."""
        return b"" if self._backlog is None else self._backlog.rest()

    def _last(self, events: bytes) -> bytes:
        return last_chunk(events) if self._is_chunked else events

    def _leave_slow(self, why: str) -> None:
        self._leave(Failure(Reason.SLOW_CLIENT, why), Cause.SLOW_CLIENT)

    def _leave_gone(self) -> None:
        self._leave(Failure(Reason.CANCELLED, "the client has closed the connection"), Cause.CLIENT_DISCONNECT)

    def _leave(self, failure: Failure, cause: Cause) -> None:
        """Send no more to the client, and end the request with `failure`."""
        self._is_open = False
        self._left = failure.reason
        self._ending.fail(failure, cause)

    def _abort(self) -> None:
        """Cut off a slow client.

        Called after the request has left the pipeline: earlier, the connection would cancel the task, and the pipeline
        would see a cancel instead of the reason.
        """
        log.warning("client cut", reason=Reason.SLOW_CLIENT, request_id=self._answer.request_id)
        self._exchange.cut()
