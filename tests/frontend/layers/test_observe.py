"""Observe counts and logs every request once, with the outcome that its client saw."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from services.core.call import Call, Cause
from services.core.common_layers import Accept, Deadline
from services.core.errors import Failure, Reason, RefusedFor
from services.core.gate import Gate
from services.core.interface import Delta, Finish, Layer, Sink, Usage
from services.core.request import FinishReason, Request
from services.core.tenant import EVERYBODY
from services.frontend.layers.observe import Observe, why_cancelled
from services.frontend.metrics.definitions import build_metrics
from services.frontend.metrics.outcomes import REJECTION_LINES_PER_S_MAX, WHY_CHARS_MAX, observe_refused
from tests.support.doubles import HANG, Script, Step, call_layer, make_request, run_async

End = Callable[[Gate, asyncio.Task[Any]], object]


class Case:
    """An Observe layer above a script, with its metrics."""

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


def test_success_is_counted_with_its_times() -> None:
    case = Case(7, FinishReason.STOP)

    run_async(call_layer(case.layer, make_request()))

    assert case.requests("success", "") == 1
    assert case.value("time_to_first_token_seconds_count") == 1
    assert case.value("request_duration_seconds_count") == 1


def test_failure_is_counted_by_its_reason() -> None:
    case = Case(Reason.OVERLOADED)

    with pytest.raises(Failure):
        run_async(call_layer(case.layer, make_request(), endpoint="completions", is_streamed=False))

    assert case.requests("error", "OVERLOADED", endpoint="completions", request_type="unary") == 1
    assert case.value("time_to_first_token_seconds_count") is None


def test_tokens_are_counted_as_billed() -> None:
    async def inner(request: Request, call: Call, sink: Sink) -> Finish:
        return Finish(FinishReason.STOP, Usage(5, 70))

    metrics = build_metrics()
    run_async(call_layer(Observe(inner, metrics, lambda _: True), make_request()))

    def total(name: str) -> float | None:
        return metrics.registry.get_sample_value(f"dynamo_frontend_{name}_sum", {"model": "m"})

    assert (total("input_sequence_tokens"), total("output_sequence_tokens")) == (5, 70)


def test_unknown_model_name_creates_no_time_series() -> None:
    case = Case(Reason.MODEL_NOT_FOUND)

    with pytest.raises(Failure):
        run_async(call_layer(case.layer, make_request(model="made up")))

    assert case.requests("error", "MODEL_NOT_FOUND", model="unknown") == 1


def test_client_that_leaves_is_counted_and_the_inflight_gauge_returns_to_zero() -> None:
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


def test_request_ended_by_its_own_sink_is_counted_with_that_reason() -> None:
    """A bug: a client that was cut off because it did not read was counted as one that had left."""
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
    assert cancellations(case) == {"slow_client": 1}


# Rejections


@pytest.mark.parametrize("take", [(), (7, 8)], ids=["at once", "in the middle of a stream"])
@pytest.mark.parametrize("reason", [Reason.OVERLOADED, Reason.WORKER_AT_CAPACITY])
def test_lack_of_capacity_is_counted_as_a_rejection_at_any_time(reason: Reason, take: tuple[int, ...]) -> None:
    case = Case(*take, reason)

    with pytest.raises(Failure):
        run_async(call_layer(case.layer, make_request(), endpoint="completions"))

    assert case.value("model_rejection_total", endpoint="completions") == 1


@pytest.mark.parametrize("reason", sorted(set(Reason) - {Reason.OVERLOADED, Reason.WORKER_AT_CAPACITY}))
def test_other_reasons_are_not_counted_as_rejections(reason: Reason) -> None:
    case = Case(reason)

    with pytest.raises(Failure):
        run_async(call_layer(case.layer, make_request()))

    assert case.value("model_rejection_total", endpoint="generate") is None


def test_each_rejection_is_counted_and_logged_once_by_its_cause() -> None:
    causes = [*(one.value for one in RefusedFor), None, "from the future"]
    failures = [Failure(Reason.OVERLOADED, "full", metadata={"cause": one} if one else {}) for one in causes]
    case = Case()
    case.script = Script(*([one] for one in failures))
    case.layer = Observe(case.script, case.metrics, lambda name: name == "m")

    with capture_logs() as logs:
        for _ in failures:
            run_async(ask_quietly(case.layer))

    counts = {one.value: case.value("model_rejection_cause_total", cause=one) for one in RefusedFor}
    assert counts == {one: 3 if one == "capacity" else 1 for one in RefusedFor}
    assert sum(count or 0 for count in counts.values()) == case.value("model_rejection_total", endpoint="generate")
    assert [line["refused_for"] for line in logs] == [*causes[:-2], "capacity", "capacity"]


def test_other_failures_have_no_rejection_cause_in_the_log() -> None:
    with capture_logs() as logs:
        run_async(ask_quietly(Case(Reason.NO_WORKERS).layer))

    assert "refused_for" not in logs[0]


# Cancellations


def cancellations(case: Case) -> dict[str, float]:
    """The number of cancellations by cause."""
    name = "dynamo_frontend_model_cancellation_total"
    samples = [sample for metric in case.registry.collect() for sample in metric.samples if sample.name == name]
    assert all(sample.labels["model"] == "m" and sample.labels["endpoint"] == "generate" for sample in samples)
    return {sample.labels["cause"]: sample.value for sample in samples}


async def end_by(case: Case, end: End, **call: Any) -> list[Any]:
    """Start a request that hangs, and end it by `end`. Returns the log."""
    gate = Gate()
    case.layer = Observe(Accept(Deadline(case.script), gate), case.metrics, lambda name: name == "m")
    with capture_logs() as logs:
        async with asyncio.TaskGroup() as group:
            asking: asyncio.Task[Any] = group.create_task(ask_quietly(case.layer, **call))
            await case.script.hanging.wait()
            end(gate, asking)
    return logs


async def ask_quietly(layer: Layer, **call: Any) -> None:
    with suppress(Failure):
        await call_layer(layer, make_request(), **call)


ENDS: dict[Cause, tuple[End, Reason]] = {
    Cause.CLIENT_DISCONNECT: (lambda _, asking: asking.cancel(), Reason.CANCELLED),
    Cause.EXPLICIT: (lambda gate, _: gate.cancel("r", EVERYBODY), Reason.CANCELLED),
    Cause.DRAIN: (lambda gate, _: gate.fail_all(Failure(Reason.DRAINING, "leaving")), Reason.DRAINING),
}


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("cause", ENDS)
def test_cause_that_ended_a_request_is_counted_and_logged_once(cause: Cause, is_streamed: bool) -> None:
    case = Case(7, HANG)
    end, reason = ENDS[cause]

    logs = run_async(end_by(case, end, is_streamed=is_streamed))

    request_type = "stream" if is_streamed else "unary"
    assert case.requests("error", reason, request_type=request_type) == 1
    assert cancellations(case) == {cause: 1}
    left = case.registry.get_sample_value("dynamo_frontend_disconnected_clients")
    assert left == (cause is Cause.CLIENT_DISCONNECT)
    assert [(line["outcome"], line["cause"]) for line in logs] == [(reason, cause)]


def test_deadline_is_counted_as_a_cause() -> None:
    async def scenario() -> Case:
        case = Case(7, HANG)
        layer = Observe(Deadline(case.script), case.metrics, lambda name: name == "m")
        await ask_quietly(layer, deadline=asyncio.get_running_loop().time() + 0.02)
        return case

    case = run_async(scenario())
    assert case.requests("error", "DEADLINE_EXCEEDED") == 1
    assert cancellations(case) == {"deadline": 1}


def test_request_cancelled_on_the_worker_counts_as_explicitly_cancelled() -> None:
    case = Case(7, Reason.CANCELLED)

    run_async(ask_quietly(case.layer))

    assert cancellations(case) == {"explicit": 1}


@pytest.mark.parametrize("reason", [Reason.DISCONNECTED, Reason.OVERLOADED, Reason.DRAINING])
def test_request_that_fails_by_itself_has_no_cause(reason: Reason) -> None:
    case = Case(7, reason)

    with capture_logs() as logs:
        run_async(ask_quietly(case.layer))

    assert cancellations(case) == {}
    assert "cause" not in logs[0]


def test_first_cause_counts_even_if_the_client_leaves_meanwhile() -> None:
    case = Case(7, HANG)

    run_async(end_by(case, lambda gate, asking: (gate.cancel("r", EVERYBODY), asking.cancel())))

    assert cancellations(case) == {"explicit": 1}


@pytest.mark.parametrize(
    ("timeout_s", "left_s", "cause"),
    [
        (None, 0.0, Cause.CLIENT_DISCONNECT),
        (100.0, 5.0, Cause.CLIENT_DISCONNECT),
        (100.0, 0.9, Cause.DEADLINE),
        (0.1, 0.02, Cause.DEADLINE),
        (1.0, 0.1, Cause.DEADLINE),
        (1.0, 0.2, Cause.CLIENT_DISCONNECT),
        (0.1, 0.05, Cause.CLIENT_DISCONNECT),
        (100.0, -1.0, Cause.DEADLINE),
    ],
)
def test_cancellation_close_to_the_deadline_counts_as_the_deadline(
    timeout_s: float | None, left_s: float, cause: Cause
) -> None:
    """gRPC cancels the handler in both cases, and for a deadline up to 1 % of the timeout early."""
    call = Call(request_id="r", deadline=None if timeout_s is None else 1000.0 + timeout_s)

    failure, found = why_cancelled(call, 1000.0, 1000.0 + (timeout_s or 0.0) - left_s)

    assert found is cause
    assert failure.reason is (Reason.DEADLINE_EXCEEDED if cause is Cause.DEADLINE else Reason.CANCELLED)


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
def test_failure_is_logged_with_its_detail_and_as_a_warning_if_it_is_the_servers(reason: Reason, level: str) -> None:
    async def inner(request: Request, call: Call, sink: Sink) -> Finish:
        raise Failure(reason, "x" * 10_000, param="prompt")

    with capture_logs() as logs, pytest.raises(Failure):
        run_async(call_layer(Observe(inner, build_metrics(), lambda _: True), make_request()))

    assert [(line["event"], line["log_level"], line["outcome"]) for line in logs] == [("request", level, reason)]
    assert logs[0]["param"] == "prompt"
    assert logs[0]["why"] == "x" * WHY_CHARS_MAX


def test_all_rejections_of_a_storm_are_counted_but_few_are_logged() -> None:
    case, more = Case(), 50
    case.script = Script(*[[Reason.OVERLOADED]] * (REJECTION_LINES_PER_S_MAX + more + 1))
    layer = Observe(case.script, case.metrics, lambda _: True)

    async def ask(times: int) -> None:
        for _ in range(times):
            with pytest.raises(Failure):
                await call_layer(layer, make_request())

    async def scenario() -> None:
        await ask(REJECTION_LINES_PER_S_MAX + more)
        await asyncio.sleep(0)  # Outcomes are logged in the next turn.
        layer._outcomes._rejection_lines._since -= 1  # As if a second had passed.
        await ask(1)

    with capture_logs() as logs:
        run_async(scenario())

    assert case.requests("error", "OVERLOADED") == REJECTION_LINES_PER_S_MAX + more + 1
    assert len(logs) == REJECTION_LINES_PER_S_MAX + 1
    assert [line.get("unlogged") for line in logs] == [None] * REJECTION_LINES_PER_S_MAX + [more]


def test_malformed_request_is_counted_and_logged() -> None:
    metrics = build_metrics()
    labels = {"model": "unknown", "endpoint": "completions", "request_type": "unary", "status": "error"}

    with capture_logs() as logs:
        observe_refused(metrics, "completions", "r-1", Failure(Reason.INVALID_ARGUMENT, "the body is not valid JSON"))

    assert logs[0]["request_id"] == "r-1"
    assert logs[0]["why"] == "the body is not valid JSON"
    labels["error_type"] = "INVALID_ARGUMENT"
    assert metrics.registry.get_sample_value("dynamo_frontend_requests_total", labels) == 1


def test_request_refused_before_the_pipeline_for_lack_of_threads_is_a_rejection() -> None:
    metrics = build_metrics()

    cause = {"cause": "preparation"}
    observe_refused(
        metrics, "completions", "r-1", Failure(Reason.OVERLOADED, "too many long requests at once", metadata=cause)
    )

    labels = {"model": "unknown", "endpoint": "completions"}
    assert metrics.registry.get_sample_value("dynamo_frontend_model_rejection_total", labels) == 1
    labels = {"model": "unknown", **cause}
    assert metrics.registry.get_sample_value("dynamo_frontend_model_rejection_cause_total", labels) == 1
