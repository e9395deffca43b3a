"""Counts and logs every request exactly once, with the outcome that its client saw."""

import asyncio
from collections.abc import Callable
from functools import cache

from prometheus_client import Gauge

from services.core.call import DEADLINE_ROUNDING, DEADLINE_TRAVEL_S, Call, Cause, Ending
from services.core.errors import Failure, Reason
from services.core.interface import Delta, Finish, Layer, Sink
from services.core.request import Request
from services.frontend.metrics.definitions import UNKNOWN_MODEL, Metrics
from services.frontend.metrics.outcomes import Outcome, Outcomes
from services.runtime.loop import clock

_PROCESS_ENDED = Failure(Reason.CANCELLED, "the process was stopped")
"""The outcome of requests that neither finish nor fail. Never raised."""


class _FirstToken:
    """Records the time of the first token."""

    __slots__ = ("_sink", "at")

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.at: float | None = None

    def deliver(self, delta: Delta) -> None:
        if self.at is None:
            self.at = clock()
        self._sink.deliver(delta)


class _Inflight:
    """The number of running requests of a model. A plain integer, which the gauge reads only when it is scraped."""

    __slots__ = ("count",)

    def __init__(self, gauge: Gauge) -> None:
        self.count = 0
        gauge.set_function(lambda: self.count)


class Observe:
    """Must be outermost: refusals and timeouts are outcomes, too."""

    def __init__(self, inner: Layer, metrics: Metrics, is_known: Callable[[str], bool]) -> None:
        self._inner = inner
        self._is_known = is_known
        self._inflight = cache(lambda model: _Inflight(metrics.inflight.labels(model)))
        self._outcomes = Outcomes(metrics)

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        first = _FirstToken(sink)
        began = clock()
        model = request.model if self._is_known(request.model) else UNKNOWN_MODEL
        inflight = self._inflight(model)
        inflight.count += 1
        result: Finish | Failure = _PROCESS_ENDED
        cause: Cause | None = None
        try:
            finish = result = await self._inner(request, call, first)
        except Failure as failure:
            result, cause = failure, cause_of(failure, call.ending)
            raise
        except asyncio.CancelledError:
            result, cause = why_cancelled(call, began, clock())
            raise
        else:
            return finish
        finally:
            inflight.count -= 1
            first_s = None if first.at is None else first.at - began
            self._outcomes.add(Outcome(model, call, result, cause, first_s, clock() - began))


def cause_of(failure: Failure, ending: Ending) -> Cause | None:
    """What ended the request before its answer was complete. None if it failed by itself."""
    if ending.failure is not None and ending.failure.reason is failure.reason:
        return ending.cause
    if failure.reason is Reason.CANCELLED:
        return Cause.EXPLICIT  # The cancel was sent to the worker, not to this frontend.
    return Cause.DEADLINE if failure.reason is Reason.DEADLINE_EXCEEDED else None


def why_cancelled(call: Call, began_s: float, now_s: float) -> tuple[Failure, Cause | None]:
    """The outcome of a request whose task was cancelled. gRPC does that both for a hang-up and for a deadline.

    If something had already ended the request, that is the cause, even if the client leaves meanwhile. Times are in
    event-loop time.
    """
    if call.ending.failure is not None:
        return call.ending.failure, call.ending.cause
    if call.deadline is not None:
        timeout_s = call.deadline - began_s
        slack_s = DEADLINE_ROUNDING * timeout_s + min(DEADLINE_TRAVEL_S, timeout_s / 4)
        if now_s >= call.deadline - slack_s:
            return Failure(Reason.DEADLINE_EXCEEDED, "the request's deadline has passed"), Cause.DEADLINE
    return Failure(Reason.CANCELLED, "the client left"), Cause.CLIENT_DISCONNECT
