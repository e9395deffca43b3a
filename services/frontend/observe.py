"""Counts every request once, with the outcome that its client saw, and writes one line about it.

Of rejections for want of capacity it writes so many lines a second at most, and how many it left out.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from services.errors import Failure, Reason
from services.frontend.metrics import UNKNOWN_MODEL, Metrics
from services.loop import clock
from services.refusals import REJECTIONS, refused_for
from services.reminder import Quota
from services.request import Call, Cause, Delta, Ending, Finish, Layer, Request, Sink
from services.telemetry import say

WHY_CHARS_MAX = 300
"""Of a failure's detail in the log: what a client sent may be part of it, at any length."""
SERVER_FAULT = 500
REFUSALS = frozenset({Reason.WORKER_AT_CAPACITY, Reason.OVERLOADED, Reason.DRAINING, Reason.SLOW_CLIENT})
"""Statuses of a server, for what is nobody's fault or the client's."""
REJECTION_LINES_PER_S_MAX = 100
"""A line is an eighth of what a rejection costs, and thousands a second help nobody: the metrics count them all."""
DEADLINE_SLACK = 0.01
"""gRPC rounds a timeout up on the wire, by at most this part of it: a client's own timer may be so much earlier."""
DEADLINE_SLACK_S = 0.01
"""The same for clocks and for the way."""


_PROCESS_ENDED = Failure(Reason.CANCELLED, "the process was ended")
"""Of requests that neither end nor fail. Never raised."""


class _FirstToken:
    """Notes when the first token passed."""

    __slots__ = ("_sink", "at")

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.at: float | None = None

    def deliver(self, delta: Delta) -> None:
        if self.at is None:
            self.at = clock()
        self._sink.deliver(delta)


@dataclass(slots=True)
class _Outcome:
    """How a request ended. cause: who had it ended before its answer was complete, if anybody had."""

    result: Finish | Failure
    cause: Cause | None = None
    first_s: float | None = None
    duration_s: float = 0.0


class Observe:
    """Above all: a refusal and a timeout are outcomes too."""

    def __init__(self, inner: Layer, metrics: Metrics, is_known: Callable[[str], bool]) -> None:
        self._inner = inner
        self._is_known = is_known
        self._inflight = cache(metrics.inflight.labels)
        self._counts = _Counts(metrics)
        self._rejection_lines = Quota(REJECTION_LINES_PER_S_MAX)

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        first = _FirstToken(sink)
        began = clock()
        model = request.model if self._is_known(request.model) else UNKNOWN_MODEL
        inflight = self._inflight(model)
        inflight.inc()
        outcome = _Outcome(_PROCESS_ENDED)
        try:
            finish = outcome.result = await self._inner(request, call, first)
        except Failure as failure:
            outcome.result, outcome.cause = failure, cause_of(failure, call.ending)
            raise
        except asyncio.CancelledError:
            outcome.result, outcome.cause = why_cancelled(call, began, clock())
            raise
        else:
            return finish
        finally:
            inflight.dec()
            outcome.first_s = None if first.at is None else first.at - began
            outcome.duration_s = clock() - began
            self._counts.add(model, call, outcome)
            self._log(model, call, outcome)

    def _log(self, model: str, call: Call, outcome: _Outcome) -> None:
        result = outcome.result
        if not (isinstance(result, Failure) and result.reason in REJECTIONS):
            _write(model, call, outcome)
        elif (unlogged := self._rejection_lines.take()) is not None:
            _write(model, call, outcome, **({"unlogged": unlogged} if unlogged else {}))


def cause_of(failure: Failure, ending: Ending) -> Cause | None:
    """Who had the request ended before its answer was complete; None: nobody, it failed by itself."""
    if ending.failure is not None and ending.failure.reason is failure.reason:
        return ending.cause
    if failure.reason is Reason.CANCELLED:
        return Cause.EXPLICIT  # It was not this frontend that was asked, but the worker.
    return Cause.DEADLINE if failure.reason is Reason.DEADLINE_EXCEEDED else None


def why_cancelled(call: Call, began_s: float, now_s: float) -> tuple[Failure, Cause | None]:
    """What became of a request whose task was cancelled: gRPC does that for a hang-up and for a deadline alike.

    Who had ended it already counts before a client that leaves meanwhile. Times are the event loop's.
    """
    if call.ending.failure is not None:
        return call.ending.failure, call.ending.cause
    if call.deadline is not None:
        slack_s = DEADLINE_SLACK * (call.deadline - began_s) + DEADLINE_SLACK_S
        if now_s >= call.deadline - slack_s:
            return Failure(Reason.DEADLINE_EXCEEDED, "the request's deadline has passed"), Cause.DEADLINE
    return Failure(Reason.CANCELLED, "the client left"), Cause.CLIENT_DISCONNECT


class _Counts:
    """The metrics of outcomes. Each series is looked up once; there are as many as models, endpoints and reasons."""

    def __init__(self, metrics: Metrics) -> None:
        self._requests = cache(metrics.requests.labels)
        self._rejections = cache(metrics.rejections.labels)
        self._rejection_causes = cache(metrics.rejection_causes.labels)
        self._cancellations = cache(metrics.cancellations.labels)
        self._disconnected = metrics.disconnected
        self._duration_s = cache(metrics.duration_s.labels)
        self._first_token_s = cache(metrics.first_token_s.labels)
        self._prompt_tokens = cache(metrics.prompt_tokens.labels)
        self._completion_tokens = cache(metrics.completion_tokens.labels)

    def add(self, model: str, call: Call, outcome: _Outcome) -> None:
        """Count a request."""
        result = outcome.result
        request_type = "stream" if call.is_streamed else "unary"
        self._duration_s(model).observe(outcome.duration_s)
        if outcome.first_s is not None:
            self._first_token_s(model).observe(outcome.first_s)
        if isinstance(result, Failure):
            self._requests(model, call.endpoint, request_type, "error", result.reason).inc()
            if result.reason in REJECTIONS:
                self._rejections(model, call.endpoint).inc()
                self._rejection_causes(model, refused_for(result)).inc()
            if outcome.cause is not None:
                self._cancellations(model, call.endpoint, request_type, outcome.cause).inc()
            if outcome.cause is Cause.CLIENT_DISCONNECT:
                self._disconnected.inc()
            return
        self._requests(model, call.endpoint, request_type, "success", "").inc()
        if result.usage is not None:
            self._prompt_tokens(model).observe(result.usage.prompt_tokens)
            self._completion_tokens(model).observe(result.usage.completion_tokens)


def _write(model: str, call: Call, outcome: _Outcome, **more: int) -> None:
    first_s = None if outcome.first_s is None else round(outcome.first_s, 4)
    level, fields = _said_of(outcome.result)
    if outcome.cause is not None:
        fields["cause"] = outcome.cause
    whose = {"request_id": call.request_id, "model": model, "endpoint": call.endpoint}
    times = {"first_token_s": first_s, "duration_s": round(outcome.duration_s, 4)}
    say(level, "request", {**whose, **fields, **more, **times})


def observe_refused(metrics: Metrics, endpoint: str, request_id: str, failure: Failure) -> None:
    """Count and log a request that was too broken for the pipeline: neither its model nor its type is known.

    request_id: empty if that is what was broken.
    """
    metrics.requests.labels(UNKNOWN_MODEL, endpoint, "unary", "error", failure.reason).inc()
    if failure.reason in REJECTIONS:
        metrics.rejections.labels(UNKNOWN_MODEL, endpoint).inc()
        metrics.rejection_causes.labels(UNKNOWN_MODEL, refused_for(failure)).inc()
    level, fields = _said_of(failure)
    whose = {"request_id": request_id} if request_id else {}
    say(level, "request", {**whose, "endpoint": endpoint, **fields})


def _said_of(outcome: Finish | Failure) -> tuple[int, dict[str, Any]]:
    """The level and the fields of the log line. A warning is for whoever runs this, not for a client's mistake."""
    if isinstance(outcome, Finish):
        tokens = {} if outcome.usage is None else {"tokens": outcome.usage.completion_tokens}
        return logging.INFO, {"outcome": outcome.reason, **tokens}
    is_ours = outcome.traits.http >= SERVER_FAULT and outcome.reason not in REFUSALS
    param = {} if outcome.param is None else {"param": outcome.param[:WHY_CHARS_MAX]}
    bound = {"refused_for": refused_for(outcome)} if outcome.reason in REJECTIONS else {}
    fields = {"outcome": outcome.reason, **bound, "why": outcome.detail[:WHY_CHARS_MAX], **param}
    return logging.WARNING if is_ours else logging.INFO, fields
