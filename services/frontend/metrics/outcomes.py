"""Counts and writes down how requests ended: those of one turn of the event loop together, in the next.

Many end at once, for a worker's step is one message; and what runs many times in a row takes half as long. No client is
ahead of it: whoever has its answer, and asks for the metrics, is read after that.
"""

import asyncio
import logging
from collections.abc import Iterator
from functools import cache
from typing import Any

from msgspec import Struct

from services.core.call import Call, Cause
from services.core.errors import REJECTIONS, Failure, Reason, refused_for
from services.core.interface import Finish
from services.frontend.metrics.definitions import UNKNOWN_MODEL, Metrics
from services.runtime.log import Event, say, say_all
from services.runtime.log_throttle import Quota

WHY_CHARS_MAX = 300
"""Of a failure's detail in the log: what a client sent may be part of it, at any length."""
SERVER_FAULT = 500
REFUSALS = frozenset({Reason.WORKER_AT_CAPACITY, Reason.OVERLOADED, Reason.DRAINING, Reason.SLOW_CLIENT})
"""Statuses of a server, for what is nobody's fault or the client's."""
REJECTION_LINES_PER_S_MAX = 100
"""A line is an eighth of what a rejection costs, and thousands a second help nobody: the metrics count them all."""


class Outcome(Struct, frozen=True):
    """How a request ended. cause: who had it ended before its answer was complete, if anybody had. Times in seconds
    from its beginning.
    """

    model: str
    call: Call
    result: Finish | Failure
    cause: Cause | None
    first_s: float | None
    duration_s: float


class Outcomes:
    """Of all requests, each once. Of rejections for want of capacity only so many lines a second are written, and how
    many were left out.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._counts = _Counts(metrics)
        self._rejection_lines = Quota(REJECTION_LINES_PER_S_MAX)
        self._new: list[Outcome] = []  # Of one turn: no more than there are requests.

    def add(self, outcome: Outcome) -> None:
        """A request has ended."""
        if not self._new:
            asyncio.get_running_loop().call_soon(self._settle)
        self._new.append(outcome)

    def _settle(self) -> None:
        outcomes, self._new = self._new, []
        for outcome in outcomes:
            self._counts.add(outcome)
        say_all(self._lines(outcomes))

    def _lines(self, outcomes: list[Outcome]) -> Iterator[Event]:
        for outcome in outcomes:
            result = outcome.result
            if not (isinstance(result, Failure) and result.reason in REJECTIONS):
                yield _line(outcome)
            elif (unlogged := self._rejection_lines.take()) is not None:
                yield _line(outcome, **({"unlogged": unlogged} if unlogged else {}))


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

    def add(self, outcome: Outcome) -> None:
        """Count a request."""
        model, call, result = outcome.model, outcome.call, outcome.result
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


def _line(outcome: Outcome, **more: int) -> Event:
    level, said = _said_of(outcome.result)
    fields = {"request_id": outcome.call.request_id, "model": outcome.model, "endpoint": outcome.call.endpoint} | said
    if outcome.cause is not None:
        fields["cause"] = outcome.cause
    fields |= more
    fields["first_token_s"] = None if outcome.first_s is None else round(outcome.first_s, 4)
    fields["duration_s"] = round(outcome.duration_s, 4)
    return level, "request", fields


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
