"""Counts every request once, with the outcome that its client saw, and writes one line about it."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import structlog

from services.errors import Failure, Reason
from services.frontend.metrics import UNKNOWN_MODEL, Metrics
from services.request import Call, Delta, Finish, Layer, Request, Sink

log = structlog.get_logger()

WHY_CHARS_MAX = 300
"""Of a failure's detail in the log: what a client sent may be part of it, at any length."""
SERVER_FAULT = 500
REFUSALS = frozenset({Reason.WORKER_AT_CAPACITY, Reason.OVERLOADED, Reason.DRAINING, Reason.SLOW_CLIENT})
"""Statuses of a server, for what is nobody's fault or the client's."""


class _FirstToken:
    """Notes when the first token passed."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._clock = asyncio.get_running_loop().time
        self.at: float | None = None

    def deliver(self, delta: Delta) -> None:
        if self.at is None:
            self.at = self._clock()
        self._sink.deliver(delta)


class Observe:
    """Above all: a refusal and a timeout are outcomes too."""

    def __init__(self, inner: Layer, metrics: Metrics, is_known: Callable[[str], bool]) -> None:
        self._inner = inner
        self._metrics = metrics
        self._is_known = is_known

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        first = _FirstToken(sink)
        clock = asyncio.get_running_loop().time
        began = clock()
        model = request.model if self._is_known(request.model) else UNKNOWN_MODEL
        outcome: Finish | Failure = Failure(Reason.CANCELLED, "the client left")
        with self._metrics.inflight.labels(model).track_inprogress():
            try:
                outcome = await self._inner(request, call, first)
            except Failure as failure:
                outcome = failure
                raise
            else:
                return outcome
            finally:
                first_s = None if first.at is None else first.at - began
                self._record(model, call, outcome, first_s, clock() - began)

    def _record(
        self, model: str, call: Call, outcome: Finish | Failure, first_s: float | None, duration_s: float
    ) -> None:
        metrics = self._metrics
        request_type = "stream" if call.is_streamed else "unary"
        status, error_type = ("error", outcome.reason) if isinstance(outcome, Failure) else ("success", "")
        metrics.requests.labels(model, call.endpoint, request_type, status, error_type).inc()
        metrics.duration_s.labels(model).observe(duration_s)
        if first_s is not None:
            metrics.first_token_s.labels(model).observe(first_s)
        if isinstance(outcome, Finish) and outcome.usage is not None:
            metrics.prompt_tokens.labels(model).observe(outcome.usage.prompt_tokens)
            metrics.completion_tokens.labels(model).observe(outcome.usage.completion_tokens)
        seconds = {"first_token_s": None if first_s is None else round(first_s, 4), "duration_s": round(duration_s, 4)}
        level, fields = _said_of(outcome)
        log.log(level, "request", request_id=call.request_id, model=model, endpoint=call.endpoint, **fields, **seconds)


def observe_refused(metrics: Metrics, endpoint: str, failure: Failure) -> None:
    """Count and log a request that was too broken for the pipeline: neither its model nor its type is known."""
    metrics.requests.labels(UNKNOWN_MODEL, endpoint, "unary", "error", failure.reason).inc()
    level, fields = _said_of(failure)
    log.log(level, "request", endpoint=endpoint, **fields)


def _said_of(outcome: Finish | Failure) -> tuple[int, dict[str, Any]]:
    """The level and the fields of the log line. A warning is for whoever runs this, not for a client's mistake."""
    if isinstance(outcome, Finish):
        tokens = {} if outcome.usage is None else {"tokens": outcome.usage.completion_tokens}
        return logging.INFO, {"outcome": outcome.reason, **tokens}
    is_ours = outcome.traits.http >= SERVER_FAULT and outcome.reason not in REFUSALS
    param = {} if outcome.param is None else {"param": outcome.param[:WHY_CHARS_MAX]}
    fields = {"outcome": outcome.reason, "why": outcome.detail[:WHY_CHARS_MAX], **param}
    return logging.WARNING if is_ours else logging.INFO, fields
