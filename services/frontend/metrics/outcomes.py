"""Counts and logs how requests ended. Requests that end in one iteration of the event loop are processed in the next.

Many requests end together, because a step of a worker is one message, and processing them in a batch takes half the
time. A client cannot observe the delay: its next request, such as a scrape, is read after the batch.
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
from services.runtime.log import Event, log_event, log_events
from services.runtime.log_throttle import LineQuota

WHY_CHARS_MAX = 300
"""Length limit of a failure's detail in the log, since it may contain text that the client sent."""
SERVER_FAULT = 500
LOGGED_AS_INFO = frozenset({Reason.WORKER_AT_CAPACITY, Reason.OVERLOADED, Reason.DRAINING, Reason.SLOW_CLIENT})
"""Reasons that are not faults of the server, although their status is 500 or above. Other such reasons are warnings."""
REJECTION_LINES_PER_S_MAX = 100
"""A log line is an eighth of the cost of a rejection, and thousands per second are useless: metrics count them all."""


class Outcome(Struct, frozen=True):
    """How a request ended.

    cause: what ended it before its answer was complete, or None.
    first_s, duration_s: seconds from its start to its first token (None without a token) and to its end.
    """

    model: str
    call: Call
    result: Finish | Failure
    cause: Cause | None
    first_s: float | None
    duration_s: float


class Outcomes:
    """Counts and logs each request once. Log lines about rejections are limited to REJECTION_LINES_PER_S_MAX; the next
    line reports how many were left out.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._counts = _Counts(metrics)
        self._rejection_lines = LineQuota(REJECTION_LINES_PER_S_MAX)
        self._new: list[Outcome] = []  # Bounded by the number of running requests.

    def add(self, outcome: Outcome) -> None:
        """Count and log the outcome in the next iteration of the event loop."""
        if not self._new:
            asyncio.get_running_loop().call_soon(self._process_new)
        self._new.append(outcome)

    def _process_new(self) -> None:
        outcomes, self._new = self._new, []
        for outcome in outcomes:
            self._counts.add(outcome)
        log_events(self._lines(outcomes))

    def _lines(self, outcomes: list[Outcome]) -> Iterator[Event]:
        for outcome in outcomes:
            result = outcome.result
            if not (isinstance(result, Failure) and result.reason in REJECTIONS):
                yield _line(outcome)
            elif (unlogged := self._rejection_lines.claim()) is not None:
                yield _line(outcome, **({"unlogged": unlogged} if unlogged else {}))


class _Counts:
    """Counts outcomes in the metrics. Looks up each series once; models, endpoints and reasons bound their number."""

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
        """Count one request."""
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
    level, result = _result_fields(outcome.result)
    fields = {"request_id": outcome.call.request_id, "model": outcome.model, "endpoint": outcome.call.endpoint} | result
    if outcome.cause is not None:
        fields["cause"] = outcome.cause
    fields |= more
    fields["first_token_s"] = None if outcome.first_s is None else round(outcome.first_s, 4)
    fields["duration_s"] = round(outcome.duration_s, 4)
    return level, "request", fields


def observe_refused(metrics: Metrics, endpoint: str, request_id: str, failure: Failure) -> None:
    """Count and log a request that was too malformed for the pipeline, so that its model and type are unknown.

    request_id: empty if the id itself was malformed.
    """
    metrics.requests.labels(UNKNOWN_MODEL, endpoint, "unary", "error", failure.reason).inc()
    if failure.reason in REJECTIONS:
        metrics.rejections.labels(UNKNOWN_MODEL, endpoint).inc()
        metrics.rejection_causes.labels(UNKNOWN_MODEL, refused_for(failure)).inc()
    level, fields = _result_fields(failure)
    request = {"request_id": request_id} if request_id else {}
    log_event(level, "request", {**request, "endpoint": endpoint, **fields})


def _result_fields(outcome: Finish | Failure) -> tuple[int, dict[str, Any]]:
    """The level and the fields of the log line. Warnings are for the operator; a client's mistake is not one."""
    if isinstance(outcome, Finish):
        tokens = {} if outcome.usage is None else {"tokens": outcome.usage.completion_tokens}
        return logging.INFO, {"outcome": outcome.reason, **tokens}
    is_ours = outcome.traits.http >= SERVER_FAULT and outcome.reason not in LOGGED_AS_INFO
    param = {} if outcome.param is None else {"param": outcome.param[:WHY_CHARS_MAX]}
    bound = {"refused_for": refused_for(outcome)} if outcome.reason in REJECTIONS else {}
    fields = {"outcome": outcome.reason, **bound, "why": outcome.detail[:WHY_CHARS_MAX], **param}
    return logging.WARNING if is_ours else logging.INFO, fields
