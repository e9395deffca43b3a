"""A streamed answer as server-sent events: formatted once, written straight from the sink into the socket."""

from collections.abc import Callable, Mapping, Sequence

import structlog

from services.core.call import Call, Cause, Ending
from services.core.common_layers import bug_failure, outcome_of
from services.core.errors import Failure, Reason
from services.core.interface import Delta, Finish, Layer
from services.core.request import Request
from services.frontend.api.openai.responses import Answer
from services.frontend.api.openai.sse_backlog import Backlog
from services.frontend.api.openai.sse_events import Events
from services.http.errors import envelope, error_response
from services.http.server.config import HttpConfig
from services.http.server.connection import Connection
from services.http.server.messages import HttpRequest, last_chunk, stream_head
from services.http.server.writer import finish_writing

log = structlog.get_logger()

Spellings = Mapping[str | None, str]
_LEFT = "the client has closed the connection"


class SseStream:
    """The sink of one streamed answer, and its response.

    The response begins with the first event, so that a failure before it still has an HTTP status of its own. Its head
    is sent together with that event, and the last event of all together with the end.

    | state | what deliver does | ends by |
    | --- | --- | --- |
    | waiting: nothing is sent | begins the response with the event | it has begun |
    | open | writes into the transport; keeps the last event | too much is unsent, or the pipeline's end |
    | slow: too much is unsent | gives it to the backlog | the client has caught up, or the pipeline's end |
    | left: client too slow, or gone | nothing | failed from outside, with the reason |
    """

    __slots__ = (
        "_answer",
        "_asked",
        "_at_end",
        "_backlog",
        "_config",
        "_connection",
        "_cork",
        "_ending",
        "_events_of",
        "_has_begun",
        "_is_chunked",
        "_is_open",
        "_left",
        "_transport",
    )

    def __init__(
        self,
        asked: HttpRequest,
        connection: Connection,
        answer: Answer,
        config: HttpConfig,
        token_bytes: Callable[[], Sequence[bytes]],
    ) -> None:
        """token_bytes: of each token id, for log probabilities."""
        if not asked.is_chunkable:
            connection.keeps_alive = False  # Without chunks its end is that of the answer.
        self._asked = asked
        self._connection = connection
        self._answer = answer
        self._config = config
        self._is_chunked = asked.is_chunkable
        self._events_of = Events(answer, token_bytes, is_chunked=asked.is_chunkable).of
        self._is_open = self._has_begun = False
        self._cork = connection.cork
        self._transport = connection.transport
        self._at_end = b""
        self._backlog: Backlog | None = None
        self._ending: Ending | None = None
        self._left: Reason | None = None

    def deliver(self, delta: Delta) -> None:
        if not self._is_open:
            self._deliver_aside(delta)
        elif event := self._events_of(delta):  # From here on: what every token costs.
            if self._transport.is_closing():
                self._leave_gone()
            elif delta.usage is not None:
                self._at_end = event
            else:
                self._cork.write(self._transport, event)

    def _deliver_aside(self, delta: Delta) -> None:
        """In every state but open."""
        if self._left is not None:
            return
        if not self._has_begun:
            if event := self._events_of(delta):
                self._begin(event, is_all=delta.usage is not None)
        elif self._transport.is_closing():
            self._leave_gone()
        else:
            assert self._backlog is not None
            self._backlog.deliver(delta)
            if self._backlog.is_caught_up:
                self._stop_backlog()
                self._is_open = True

    async def serve(self, pipeline: Layer, request: Request, call: Call, spellings: Spellings) -> None:
        """Run the request and send its answer. Raises nothing but a cancel.

        A client that is too slow, or gone, has its request failed from outside, so that it ends with that reason below
        whatever counts outcomes. spellings: see Body.spellings.
        """
        self._ending = call.ending
        try:
            outcome = await outcome_of(pipeline, request, call, self)
        except Exception as error:
            outcome = bug_failure(error, call.request_id)
        finally:
            self._connection.on_full = None
            self._stop_backlog()
        try:
            if self._left is None:
                last = self._end_of(outcome, spellings)
                await finish_writing(self._connection, last, self._config.client, self._answer.request_id)
            elif self._left is Reason.SLOW_CLIENT:
                self._cut()
        except Exception as error:
            self._transport.abort()
            bug_failure(error, call.request_id)

    def _stop_backlog(self) -> None:
        if self._backlog is not None:
            self._backlog.stop()

    def _begin(self, event: bytes, *, is_all: bool) -> None:
        """Send the head and the first event; is_all: with the end, for nothing more comes before that."""
        if self._transport.is_closing():
            self._leave_gone()
            return
        is_last = not self._connection.keeps_alive
        head = stream_head(self._asked.id, self._asked.shared, is_chunked=self._is_chunked, is_last=is_last)
        self._has_begun = self._is_open = True
        if is_all:
            self._at_end = head + event
            return
        self._connection.on_full = self._become_slow
        self._cork.write(self._transport, head + event)

    def _become_slow(self) -> None:
        """Too much is unsent: what comes goes another way, until there is room again."""
        if not self._is_open:
            return  # It goes that way already.
        self._is_open = False
        self._backlog = Backlog(self._connection, self._events_of, self._config.client, self._leave_slow)

    def _end_of(self, outcome: Finish | Failure, spellings: Spellings) -> bytes:
        """The last bytes: those of the stream, or of a failure that came before its first event."""
        if isinstance(outcome, Failure):
            outcome.param = spellings.get(outcome.param, outcome.param)
            last = self._failed(outcome)
            outcome.forget_way()
            return last
        assert outcome.usage is not None, "present sets usage"
        return self._at_end + self._rest() + self._last(self._answer.ending(outcome.usage))

    def _failed(self, failure: Failure) -> bytes:
        if self._has_begun:
            event = b"event: error\ndata: %b\n\n" % envelope(failure, self._answer.request_id)
            return self._at_end + self._rest() + self._last(event)
        response = error_response(failure, self._answer.request_id, overload_status=self._config.overload_status)
        return response.encode(self._asked, is_last=not self._connection.keeps_alive)

    def _rest(self) -> bytes:
        """What the backlog holds still, room or not: it is within the bound."""
        return b"" if self._backlog is None else self._backlog.rest()

    def _last(self, events: bytes) -> bytes:
        return last_chunk(events) if self._is_chunked else events

    def _leave_slow(self, why: str) -> None:
        self._leave(Failure(Reason.SLOW_CLIENT, why), Cause.SLOW_CLIENT)

    def _leave_gone(self) -> None:
        self._leave(Failure(Reason.CANCELLED, _LEFT), Cause.CLIENT_DISCONNECT)

    def _leave(self, failure: Failure, cause: Cause) -> None:
        """The client gets no more: end the request, and say why."""
        self._is_open = False
        self._left = failure.reason
        assert self._ending is not None, "nothing is delivered before it is served"
        self._ending.fail(failure, cause)

    def _cut(self) -> None:
        """After the request has left the pipeline: a cancel by the connection would hide the reason from it."""
        log.warning("client cut", reason=Reason.SLOW_CLIENT, request_id=self._answer.request_id)
        self._transport.abort()
