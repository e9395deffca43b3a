"""A streamed answer as server-sent events: formatted once, written straight from the sink into the socket."""

import asyncio
from collections.abc import Callable, Sequence

import structlog
from aiohttp import HttpVersion11, web

from services.errors import Failure, Reason
from services.frontend.http.answers import Answer
from services.frontend.http.backlog import Backlog
from services.frontend.http.config import HttpConfig
from services.frontend.http.errors import envelope
from services.frontend.http.events import Events
from services.frontend.http.head import Sent, head_of, last_chunk
from services.frontend.http.sending import finish_writing
from services.layers import outcome_of
from services.request import Call, Cause, Delta, Ending, Finish, Layer, Request

log = structlog.get_logger()

_LEFT = "the client has closed the connection"


class SseStream:
    """The sink of one streamed answer, and its response.

    The response begins with the first event, so that a failure before it still has an HTTP status of its own. Its head
    is sent together with that event, and the last event of all together with the end.

    | state | what deliver does | ends by |
    | --- | --- | --- |
    | waiting: nothing is sent | begins the response with the event | it has begun |
    | open | writes into the transport; keeps the last event | something stays unsent, or the pipeline's end |
    | slow: something is unsent | gives it to the backlog | all is sent, or the pipeline's end |
    | left: client too slow, or gone | nothing | failed from outside, with the reason |
    """

    def __init__(
        self,
        http_request: web.Request,
        answer: Answer,
        config: HttpConfig,
        token_bytes: Callable[[], Sequence[bytes]],
        *,
        is_last: bool,
    ) -> None:
        """token_bytes: of each token id, for log probabilities. is_last: the connection takes no request after this."""
        self._http_request = http_request
        self._answer = answer
        self._config = config
        self._is_chunked = http_request.version >= HttpVersion11
        self._is_last = is_last or not self._is_chunked or not http_request.keep_alive
        self._events_of = Events(answer, token_bytes, is_chunked=self._is_chunked).of
        self._is_open = False
        self._transport: asyncio.Transport | None = None
        self._at_end = b""
        self._backlog: Backlog | None = None
        self._group = asyncio.TaskGroup()
        self._ending = Ending()
        self._left: Reason | None = None

    def deliver(self, delta: Delta) -> None:
        if not self._is_open:
            self._deliver_aside(delta)
        elif event := self._events_of(delta):  # From here on: what every token costs.
            transport = self._transport
            assert transport is not None
            if transport.is_closing():
                self._leave_gone()
            elif delta.usage is not None:
                self._at_end = event
            else:
                transport.write(event)
                if transport.get_write_buffer_size():
                    self._become_slow(transport)

    def _deliver_aside(self, delta: Delta) -> None:
        """In every state but open."""
        if self._left is not None:
            return
        if self._transport is None:
            if event := self._events_of(delta):
                self._begin(event, is_all=delta.usage is not None)
        elif self._transport.is_closing():
            self._leave_gone()
        else:
            assert self._backlog is not None
            self._backlog.deliver(delta, self._group)
            if self._backlog.is_empty:
                self._backlog.stop()
                self._is_open = True

    async def serve(self, pipeline: Layer, request: Request, call: Call) -> web.StreamResponse:
        """Run the request and send its answer. Raises Failure if it fails before the first event.

        A client that is too slow, or gone, has its request failed from outside, so that it ends with that reason below
        whatever counts outcomes.
        """
        self._ending = call.ending
        try:
            outcome = await self._run(pipeline, request, call)
        finally:
            if self._backlog is not None:
                self._backlog.stop()
        if self._left is Reason.SLOW_CLIENT:
            self._cut()
        elif self._transport is None:  # What ends well has begun: then it is the client that has gone meanwhile.
            raise outcome if isinstance(outcome, Failure) else Failure(Reason.CANCELLED, _LEFT)
        else:
            await self._close(self._transport, outcome)
        return Sent(keeps_alive=not self._is_last)

    async def _run(self, pipeline: Layer, request: Request, call: Call) -> Finish | Failure:
        async with self._group:
            outcome = await outcome_of(pipeline, request, call, self)
            if self._backlog is not None:
                self._backlog.stop()
        return outcome

    def _begin(self, event: bytes, *, is_all: bool) -> None:
        """Send the head and the first event; is_all: with the end, for nothing more comes before that."""
        transport = self._http_request.transport
        if transport is None or transport.is_closing():
            self._leave_gone()
            return
        first = head_of(self._answer.request_id, is_chunked=self._is_chunked, is_last=self._is_last) + event
        self._http_request.writer.output_size += len(first)  # Whoever sends errors looks there whether it still can.
        self._transport, self._is_open = transport, True
        if is_all:
            self._at_end = first
            return
        transport.write(first)
        if transport.get_write_buffer_size():
            self._become_slow(transport)

    def _become_slow(self, transport: asyncio.Transport) -> None:
        """Something is unsent: what comes goes another way, until nothing is."""
        self._is_open = False
        writer = self._http_request.writer
        self._backlog = Backlog(transport, writer, self._events_of, self._config.client, self._leave_slow)

    async def _close(self, transport: asyncio.Transport, outcome: Finish | Failure) -> None:
        if self._backlog is not None:
            self._backlog.flush()
        if isinstance(outcome, Failure):
            last = b"event: error\ndata: %b\n\n" % envelope(outcome, self._answer.request_id)
        else:
            assert outcome.usage is not None, "present sets usage"
            last = self._answer.ending(outcome.usage)
        end = self._at_end + (last_chunk(last) if self._is_chunked else last)
        await finish_writing(self._http_request, transport, end, self._config, self._answer.request_id)

    def _leave_slow(self, why: str) -> None:
        self._leave(Failure(Reason.SLOW_CLIENT, why), Cause.SLOW_CLIENT)

    def _leave_gone(self) -> None:
        self._leave(Failure(Reason.CANCELLED, _LEFT), Cause.CLIENT_DISCONNECT)

    def _leave(self, failure: Failure, cause: Cause) -> None:
        """The client gets no more: end the request, and say why."""
        self._is_open = False
        self._left = failure.reason
        self._ending.fail(failure, cause)

    def _cut(self) -> None:
        """After the request is gone from the pipeline, so that aiohttp's own cancel cannot hide the reason from it."""
        log.warning("client cut", reason=Reason.SLOW_CLIENT, request_id=self._answer.request_id)
        if self._transport is not None:
            self._transport.abort()
