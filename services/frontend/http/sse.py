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
from services.frontend.http.sending import finish_sending
from services.layers import outcome_of
from services.request import Call, Cause, Delta, Ending, Finish, Layer, Request

log = structlog.get_logger()

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}

_LEFT = "the client has closed the connection"


class SseStream:
    """The sink of one streamed answer, and its response.

    The response begins with the first event, so that a failure before it still has an HTTP status of its own. Events
    that come between the first one and the prepared response, one turn of the loop, are held and written first.

    | state | what deliver does | ends by |
    | --- | --- | --- |
    | waiting: not prepared yet | holds the event, starts `_open` | `_open` |
    | open | writes into the transport | something stays unsent, or the pipeline's end |
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
        self._response = web.StreamResponse(headers={**HEADERS, "X-Request-Id": answer.request_id})
        is_chunked = http_request.version >= HttpVersion11
        self._events_of = Events(answer, token_bytes, is_chunked=is_chunked).of
        if is_last or not is_chunked:
            self._response.force_close()  # Without chunks the end of the connection is the end of the body.
        self._is_open = False
        self._transport: asyncio.Transport | None = None
        self._held: list[bytes] = []
        self._backlog: Backlog | None = None
        self._group = asyncio.TaskGroup()
        self._has_begun = False
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
                self._held.append(event)
                self._begin()
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
            return self._response
        if not self._response.prepared:  # What ends well has begun: then it is the client that has gone meanwhile.
            raise outcome if isinstance(outcome, Failure) else Failure(Reason.CANCELLED, _LEFT)
        await self._close(outcome)
        return self._response

    async def _run(self, pipeline: Layer, request: Request, call: Call) -> Finish | Failure:
        async with self._group:
            outcome = await outcome_of(pipeline, request, call, self)
            if isinstance(outcome, Finish):
                self._begin()
            if self._backlog is not None:
                self._backlog.stop()
        return outcome

    def _begin(self) -> None:
        """Not before there is something to send: what is refused before needs no second task."""
        if not self._has_begun:
            self._has_begun = True
            self._group.create_task(self._open())

    async def _open(self) -> None:
        try:
            await self._response.prepare(self._http_request)
        except ConnectionError:
            self._leave_gone()
            return
        assert self._http_request.writer.output_size, (
            "prepare has sent the headers: the transport is ours until the end"
        )
        first = b"".join(self._held)
        self._held.clear()
        transport = self._http_request.transport
        if transport is None:
            return  # Gone: aiohttp has the whole request cancelled.
        self._transport, self._is_open = transport, True
        transport.write(first)
        if transport.get_write_buffer_size():
            self._become_slow(transport)

    def _become_slow(self, transport: asyncio.Transport) -> None:
        """Something is unsent: what comes goes another way, until nothing is."""
        self._is_open = False
        writer = self._http_request.writer
        self._backlog = Backlog(transport, writer, self._events_of, self._config.client, self._leave_slow)

    async def _close(self, outcome: Finish | Failure) -> None:
        if self._backlog is not None:
            self._backlog.flush()
        if isinstance(outcome, Failure):
            last = b"event: error\ndata: %b\n\n" % envelope(outcome, self._answer.request_id)
        else:
            assert outcome.usage is not None, "present sets usage"
            last = self._answer.ending(outcome.usage)
        await finish_sending(self._http_request, self._response, self._config, self._answer.request_id, last)

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
