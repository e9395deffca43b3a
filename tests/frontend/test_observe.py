"""Observe: every request is counted once, with the outcome that its client saw."""

import asyncio
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from services.errors import Failure, Reason
from services.frontend.metrics import build_metrics
from services.frontend.observe import WHY_CHARS_MAX, Observe, observe_refused
from services.layers import Accept, Gate
from services.request import Call, Cause, Delta, Finish, FinishReason, Request, Sink, Usage
from tests.support import HANG, Script, Step, call_layer, make_request, run_async


class Case:
    """An Observe layer and its metrics."""

    def __init__(self, *take: Step) -> None:
        self.script = Script(take)
        self.metrics = build_metrics()
        self.registry: CollectorRegistry = self.metrics.registry
        self.layer = Observe(self.script, self.metrics, lambda name: name == "m")

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"dynamo_frontend_{name}", {"model": "m"} | labels)

    def requests(self, status: str, error_type: str, **labels: str) -> float | None:
        given = {"endpoint": "generate", "request_type": "stream", "status": status, "error_type": error_type}
        return self.value("requests_total", **(given | labels))


def test_counts_a_success_with_its_times() -> None:
    case = Case(7, FinishReason.STOP)

    run_async(call_layer(case.layer, make_request()))

    assert case.requests("success", "") == 1
    assert case.value("time_to_first_token_seconds_count") == 1
    assert case.value("request_duration_seconds_count") == 1


def test_counts_a_failure_by_its_reason() -> None:
    case = Case(Reason.OVERLOADED)

    with pytest.raises(Failure):
        run_async(call_layer(case.layer, make_request(), endpoint="completions", is_streamed=False))

    assert case.requests("error", "OVERLOADED", endpoint="completions", request_type="unary") == 1
    assert case.value("time_to_first_token_seconds_count") is None


def test_counts_tokens_as_they_are_billed() -> None:
    async def inner(request: Request, call: Call, sink: Sink) -> Finish:
        return Finish(FinishReason.STOP, Usage(5, 70))

    metrics = build_metrics()
    run_async(call_layer(Observe(inner, metrics, lambda _: True), make_request()))

    def total(name: str) -> float | None:
        return metrics.registry.get_sample_value(f"dynamo_frontend_{name}_sum", {"model": "m"})

    assert (total("input_sequence_tokens"), total("output_sequence_tokens")) == (5, 70)


def test_a_model_that_a_client_made_up_makes_no_time_series() -> None:
    case = Case(Reason.MODEL_NOT_FOUND)

    with pytest.raises(Failure):
        run_async(call_layer(case.layer, make_request(model="made up")))

    assert case.requests("error", "MODEL_NOT_FOUND", model="unknown") == 1


def test_a_client_that_leaves_is_counted_and_the_gauge_goes_back() -> None:
    async def scenario() -> Case:
        case = Case(7, HANG)
        async with asyncio.TaskGroup() as group:
            task: asyncio.Task[Any] = group.create_task(call_layer(case.layer, make_request()))
            await case.script.hanging.wait()
            assert case.value("inflight_requests") == 1
            task.cancel()
        return case

    case = run_async(scenario())
    assert case.requests("error", "CANCELLED") == 1
    assert case.value("inflight_requests") == 0


def test_a_request_that_its_own_sink_had_ended_is_counted_with_that_reason() -> None:
    """Once a client that was cut for not reading was counted as one that had left."""
    case = Case(7, HANG)
    case.layer = Observe(Accept(case.script, Gate()), case.metrics, lambda name: name == "m")

    class Full:
        def __init__(self, call: Call) -> None:
            self._call = call

        def deliver(self, delta: Delta) -> None:
            self._call.ending.fail(Failure(Reason.SLOW_CLIENT, "unread"), Cause.SLOW_CLIENT)

    async def scenario() -> Reason:
        call = Call(request_id="r")
        with pytest.raises(Failure) as caught:
            await case.layer(make_request(), call, Full(call))
        return caught.value.reason

    assert run_async(scenario()) is Reason.SLOW_CLIENT
    assert case.requests("error", "SLOW_CLIENT") == 1


@pytest.mark.parametrize(
    ("reason", "level"),
    [
        (Reason.DISCONNECTED, "warning"),
        (Reason.INTERNAL, "warning"),
        (Reason.NO_WORKERS, "warning"),
        (Reason.OVERLOADED, "info"),
        (Reason.INVALID_ARGUMENT, "info"),
    ],
)
def test_a_failure_is_logged_with_its_detail_and_warns_when_it_is_ours(reason: Reason, level: str) -> None:
    async def inner(request: Request, call: Call, sink: Sink) -> Finish:
        raise Failure(reason, "x" * 10_000, param="prompt")

    with capture_logs() as logs, pytest.raises(Failure):
        run_async(call_layer(Observe(inner, build_metrics(), lambda _: True), make_request()))

    assert [(line["event"], line["log_level"], line["outcome"]) for line in logs] == [("request", level, reason)]
    assert logs[0]["param"] == "prompt"
    assert logs[0]["why"] == "x" * WHY_CHARS_MAX


def test_a_request_too_broken_for_the_pipeline_is_counted_and_logged_too() -> None:
    metrics = build_metrics()
    labels = {"model": "unknown", "endpoint": "completions", "request_type": "unary", "status": "error"}

    with capture_logs() as logs:
        observe_refused(metrics, "completions", Failure(Reason.INVALID_ARGUMENT, "the body is not valid JSON"))

    assert logs[0]["why"] == "the body is not valid JSON"
    labels["error_type"] = "INVALID_ARGUMENT"
    assert metrics.registry.get_sample_value("dynamo_frontend_requests_total", labels) == 1
