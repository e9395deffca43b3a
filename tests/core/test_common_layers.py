"""The shared layers: each passes answers, failures and cancels through, and does its one thing."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from structlog.testing import capture_logs

from services.core.call import Call, Cause
from services.core.common_layers import Accept, Deadline, Guard, stack
from services.core.errors import Failure, Reason
from services.core.gate import Gate
from services.core.interface import Finish, Layer, Sink
from services.core.request import FinishReason, Request
from tests.support.doubles import HANG, Collected, Script, call_layer, make_request, run_async

LOST = Failure(Reason.DISCONNECTED, "lost")


# Stack


class Named:
    """A layer that records when it is entered."""

    def __init__(self, inner: Layer, name: str, entered: list[str]) -> None:
        self._inner, self._name, self._entered = inner, name, entered

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        self._entered.append(self._name)
        return await self._inner(request, call, sink)


def test_a_stack_is_entered_from_its_first_layer_to_the_innermost() -> None:
    entered: list[str] = []
    layer = stack(*(partial(Named, name=name, entered=entered) for name in "abc"), innermost=Script([7]))

    assert run_async(call_layer(layer, make_request())).token_ids == [7]
    assert entered == ["a", "b", "c"]


def test_an_empty_stack_is_the_innermost_layer() -> None:
    script = Script()

    assert stack(innermost=script) is script


@pytest.mark.parametrize("wrap", [Guard, Deadline, lambda inner: Accept(inner, Gate())])
def test_each_layer_passes_a_complete_answer_through(wrap: Callable[[Layer], Layer]) -> None:
    async def scenario() -> Any:
        return await call_layer(wrap(Script([7, b"ab", FinishReason.STOP])), make_request())

    result = run_async(scenario())

    assert result.token_ids == [7, *b"ab"]
    assert result.finish.reason is FinishReason.STOP


@pytest.mark.parametrize("wrap", [Guard, Deadline, lambda inner: Accept(inner, Gate())])
def test_each_layer_passes_a_failure_and_a_cancel_through(wrap: Callable[[Layer], Layer]) -> None:
    async def scenario() -> tuple[Reason, int]:
        script = Script([7, Reason.STALLED], [7, HANG])
        layer = wrap(script)
        with pytest.raises(Failure) as caught:
            await call_layer(layer, make_request())
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(
                call_layer(layer, make_request(), deadline=asyncio.get_running_loop().time() + 60)
            )
            await script.hanging.wait()
            asking.cancel()
        assert asking.cancelled()
        return caught.value.reason, script.cancelled_count

    assert run_async(scenario()) == (Reason.STALLED, 1)


# Guard


@pytest.mark.parametrize("bug", [ValueError("inside"), TimeoutError(), ExceptionGroup("", [KeyError("inside")])])
def test_a_bug_is_logged_and_becomes_an_internal_failure_that_reveals_nothing(bug: Exception) -> None:
    with capture_logs() as logs, pytest.raises(Failure) as caught:
        run_async(call_layer(Guard(Script([7, bug])), make_request(), request_id="r-1"))

    assert caught.value.reason is Reason.INTERNAL
    assert "r-1" in caught.value.detail
    assert "inside" not in caught.value.detail
    assert [(entry["log_level"], entry["request_id"], entry["exc_info"]) for entry in logs] == [("error", "r-1", bug)]


# Deadline


def test_a_request_is_cancelled_when_its_deadline_passes() -> None:
    async def scenario() -> tuple[Reason, int]:
        script = Script([7, HANG])
        with pytest.raises(Failure) as caught:
            await call_layer(Deadline(script), make_request(), deadline=asyncio.get_running_loop().time() + 0.02)
        return caught.value.reason, script.cancelled_count

    assert run_async(scenario()) == (Reason.DEADLINE_EXCEEDED, 1)


def test_a_deadline_in_the_past_ends_the_request_at_its_first_wait() -> None:
    async def scenario() -> Reason:
        with pytest.raises(Failure) as caught:
            await call_layer(Deadline(Script([7, HANG])), make_request(), deadline=0.0)
        return caught.value.reason

    assert run_async(scenario()) is Reason.DEADLINE_EXCEEDED


def test_a_timeout_error_of_a_lower_layer_is_not_taken_for_the_deadline() -> None:
    async def scenario() -> None:
        await call_layer(
            Deadline(Script([TimeoutError("below")])), make_request(), deadline=asyncio.get_running_loop().time() + 60
        )

    with pytest.raises(TimeoutError, match="below"):
        run_async(scenario())


# Accept


@pytest.mark.parametrize("end", [FinishReason.STOP, Reason.STALLED, ValueError("a bug")])
def test_a_request_leaves_the_gate_however_it_ends(end: Any) -> None:
    async def scenario() -> int:
        gate = Gate()
        with suppress(Failure, ValueError):
            await call_layer(Accept(Script([end]), gate), make_request())
        return gate.count

    assert run_async(scenario()) == 0


def test_the_first_failure_from_outside_wins_even_over_a_complete_answer() -> None:
    """Its client was told of the failure: with the outcome "stop", a truncated answer would be counted as complete."""

    async def inner(request: Request, call: Call, sink: Sink) -> Finish:
        call.ending.fail(LOST, Cause.DRAIN)
        call.ending.fail(Failure(Reason.DRAINING, "later"), Cause.DRAIN)
        return Finish(FinishReason.STOP)

    async def scenario() -> Failure:
        with pytest.raises(Failure) as caught:
            await call_layer(Accept(inner, Gate()), make_request())
        return caught.value

    assert run_async(scenario()) is LOST


def test_a_failure_from_outside_after_the_end_has_no_effect() -> None:
    async def scenario() -> Finish:
        call = Call(request_id="r")
        finish = await Accept(Script([7]), Gate())(make_request(), call, Collected())
        call.ending.fail(LOST, Cause.DRAIN)
        return finish

    assert run_async(scenario()).reason is FinishReason.LENGTH


def test_a_cancel_of_the_task_wins_over_a_failure_from_outside_at_the_same_time() -> None:
    async def scenario() -> bool:
        gate, script = Gate(), Script([7, HANG])
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(call_layer(Accept(script, gate), make_request()))
            await script.hanging.wait()
            gate.fail_all(LOST)
            asking.cancel()
        return asking.cancelled() and gate.count == 0

    assert run_async(scenario())


def test_a_timeout_error_of_a_lower_layer_is_not_taken_for_an_ending() -> None:
    with pytest.raises(TimeoutError, match="below"):
        run_async(call_layer(Accept(Script([TimeoutError("below")]), Gate()), make_request()))
