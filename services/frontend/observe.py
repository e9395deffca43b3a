"""Counts every request once, with the outcome that its client saw, and writes one line about it."""

import asyncio
from collections.abc import Callable

import structlog

from services.errors import Failure
from services.frontend.metrics import UNKNOWN_MODEL, Metrics
from services.request import Call, Delta, Finish, Layer, Request, Sink

log = structlog.get_logger()


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
        outcome: Finish | str = "CANCELLED"
        with self._metrics.inflight.labels(model).track_inprogress():
            try:
                outcome = await self._inner(request, call, first)
            except Failure as failure:
                outcome = failure.reason
                raise
            else:
                return outcome
            finally:
                first_s = None if first.at is None else first.at - began
                self._record(model, call, outcome, first_s, clock() - began)

    def _record(self, model: str, call: Call, outcome: Finish | str, first_s: float | None, duration_s: float) -> None:
        metrics, is_good = self._metrics, isinstance(outcome, Finish)
        request_type = "stream" if call.is_streamed else "unary"
        status, error_type = ("success", "") if is_good else ("error", str(outcome))
        metrics.requests.labels(model, call.endpoint, request_type, status, error_type).inc()
        metrics.duration_s.labels(model).observe(duration_s)
        if first_s is not None:
            metrics.first_token_s.labels(model).observe(first_s)
        fields: dict[str, object] = {"outcome": outcome.reason if isinstance(outcome, Finish) else outcome}
        if isinstance(outcome, Finish) and outcome.usage is not None:
            metrics.prompt_tokens.labels(model).observe(outcome.usage.prompt_tokens)
            metrics.completion_tokens.labels(model).observe(outcome.usage.completion_tokens)
            fields["tokens"] = outcome.usage.completion_tokens
        seconds = {"first_token_s": None if first_s is None else round(first_s, 4), "duration_s": round(duration_s, 4)}
        log.info("request", request_id=call.request_id, model=model, endpoint=call.endpoint, **fields, **seconds)
