"""Layers: what is shared by all of them."""

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
from services.runtime.loop import run_on_loop
from services.runtime.tasks import root_cause
from tests.support.doubles import HANG, Collected, Script, call_layer, make_request, run_async

LOST = Failure(Reason.DISCONNECTED, "lost")


def test_the_root_cause_of_nested_groups_is_the_first_exception() -> None:
    async def scenario() -> BaseException:
        return root_cause(ExceptionGroup("", [ExceptionGroup("", [LOST]), ValueError()]))

    assert run_on_loop(scenario()) is LOST


def test_a_cancellation_is_not_forgotten_for_a_failure_that_came_at_the_same_time() -> None:
    """Seen as a process that did not end: the loop around the group went on."""

    async def scenario() -> None:
        is_cleaning, may_end = asyncio.Event(), asyncio.Event()

        async def slow_to_end() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                is_cleaning.set()
                await may_end.wait()

        async def owner() -> None:
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(slow_to_end())
                    await asyncio.sleep(0)
                    raise LOST
            except ExceptionGroup as group_:
                raise root_cause(group_) from None

        async with asyncio.TaskGroup() as group:
            owning = group.create_task(owner())
            await is_cleaning.wait()
            owning.cancel()
            may_end.set()

        assert owning.cancelled()

    run_on_loop(scenario())


# Stack


class Named:
    """A layer that says when it is entered."""

    def __init__(self, inner: Layer, name: str, entered: list[str]) -> None:
        self._inner, self._name, self._entered = inner, name, entered

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        self._entered.append(self._name)
        return await self._inner(request, call, sink)


def test_a_stack_is_entered_from_the_first_to_the_innermost() -> None:
    entered: list[str] = []
    layer = stack(*(partial(Named, name=name, entered=entered) for name in "abc"), innermost=Script([7]))

    assert run_async(call_layer(layer, make_request())).token_ids == [7]
    assert entered == ["a", "b", "c"]


def test_an_empty_stack_is_the_innermost() -> None:
    script = Script()

    assert stack(innermost=script) is script


@pytest.mark.parametrize("wrap", [Guard, Deadline, lambda inner: Accept(inner, Gate())])
def test_each_of_them_passes_a_whole_answer_through(wrap: Callable[[Layer], Layer]) -> None:
    async def scenario() -> Any:
        return await call_layer(wrap(Script([7, b"ab", FinishReason.STOP])), make_request())

    result = run_async(scenario())

    assert result.token_ids == [7, *b"ab"]
    assert result.finish.reason is FinishReason.STOP


@pytest.mark.parametrize("wrap", [Guard, Deadline, lambda inner: Accept(inner, Gate())])
def test_each_of_them_passes_a_failure_and_a_hang_up_through(wrap: Callable[[Layer], Layer]) -> None:
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
def test_a_bug_is_an_internal_failure_that_is_logged_and_says_nothing_of_the_inside(bug: Exception) -> None:
    with capture_logs() as logs, pytest.raises(Failure) as caught:
        run_async(call_layer(Guard(Script([7, bug])), make_request(), request_id="r-1"))

    assert caught.value.reason is Reason.INTERNAL
    assert "r-1" in caught.value.detail
    assert "inside" not in caught.value.detail
    assert [(entry["log_level"], entry["request_id"], entry["exc_info"]) for entry in logs] == [("error", "r-1", bug)]


# Deadline


def test_a_request_ends_when_its_deadline_has_passed_and_leaves_nothing_running() -> None:
    async def scenario() -> tuple[Reason, int]:
        script = Script([7, HANG])
        with pytest.raises(Failure) as caught:
            await call_layer(Deadline(script), make_request(), deadline=asyncio.get_running_loop().time() + 0.02)
        return caught.value.reason, script.cancelled_count

    assert run_async(scenario()) == (Reason.DEADLINE_EXCEEDED, 1)


def test_a_deadline_that_has_passed_already_ends_it_at_its_first_wait() -> None:
    async def scenario() -> Reason:
        with pytest.raises(Failure) as caught:
            await call_layer(Deadline(Script([7, HANG])), make_request(), deadline=0.0)
        return caught.value.reason

    assert run_async(scenario()) is Reason.DEADLINE_EXCEEDED


def test_a_timeout_from_below_is_not_taken_for_the_deadline() -> None:
    async def scenario() -> None:
        await call_layer(
            Deadline(Script([TimeoutError("below")])), make_request(), deadline=asyncio.get_running_loop().time() + 60
        )

    with pytest.raises(TimeoutError, match="below"):
        run_async(scenario())


# Gate and Accept


def test_a_process_that_leaves_takes_nothing_new_and_lets_what_runs_finish() -> None:
    async def scenario() -> tuple[Reason, int, list[bool]]:
        gate, script = Gate(), Script([7, HANG], [8])
        layer = Accept(script, gate)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(call_layer(layer, make_request()))
            await script.hanging.wait()
            gate.is_draining = True
            with pytest.raises(Failure) as caught:
                await call_layer(layer, make_request())
            quiet = [await gate.wait_quiet(0)]
            running.cancel()
        quiet.append(await gate.wait_quiet(5))
        assert caught.value.retry_after_s is not None
        return caught.value.reason, len(script.requests), quiet

    assert run_async(scenario()) == (Reason.DRAINING, 1, [False, True])


@pytest.mark.parametrize("end", [FinishReason.STOP, Reason.STALLED, ValueError("a bug")])
def test_every_way_out_is_counted(end: Any) -> None:
    async def scenario() -> int:
        gate = Gate()
        with suppress(Failure, ValueError):
            await call_layer(Accept(Script([end]), gate), make_request())
        return gate.count

    assert run_async(scenario()) == 0


def test_the_gate_is_quiet_only_when_the_last_request_has_left() -> None:
    async def scenario() -> list[bool]:
        gate, first, second = Gate(), Call(request_id="r"), Call(request_id="r")
        seen = [await gate.wait_quiet(0)]
        gate.enter(first)
        gate.enter(second)
        gate.leave(first)
        seen.append(await gate.wait_quiet(0))
        gate.leave(second)
        return [*seen, await gate.wait_quiet(0)]

    assert run_async(scenario()) == [True, False, True]


def test_what_is_inside_can_be_failed_from_outside_and_is_gone_then() -> None:
    async def scenario() -> tuple[list[Failure], int, bool]:
        gate, script = Gate(), Script([7, HANG], [8, HANG])
        layer, failures = Accept(Deadline(script), gate), []

        async def ask() -> None:
            with pytest.raises(Failure) as caught:
                await call_layer(layer, make_request())
            failures.append(caught.value)

        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(ask())
            while gate.count < 2:
                await asyncio.sleep(0)
            gate.fail_all(LOST)
            is_quiet = await gate.wait_quiet(5)
        return failures, script.cancelled_count, is_quiet

    assert run_async(scenario()) == ([LOST, LOST], 2, True)


def test_the_first_failure_from_outside_counts_even_against_a_complete_answer() -> None:
    """Who ended it has let its client go: an outcome "stop" would be a truncated answer that nobody counts."""

    async def inner(request: Request, call: Call, sink: Sink) -> Finish:
        call.ending.fail(LOST, Cause.DRAIN)
        call.ending.fail(Failure(Reason.DRAINING, "later"), Cause.DRAIN)
        return Finish(FinishReason.STOP)

    async def scenario() -> Failure:
        with pytest.raises(Failure) as caught:
            await call_layer(Accept(inner, Gate()), make_request())
        return caught.value

    assert run_async(scenario()) is LOST


def test_a_failure_from_outside_that_comes_after_the_end_changes_nothing() -> None:
    async def scenario() -> Finish:
        call = Call(request_id="r")
        finish = await Accept(Script([7]), Gate())(make_request(), call, Collected())
        call.ending.fail(LOST, Cause.DRAIN)
        return finish

    assert run_async(scenario()).reason is FinishReason.LENGTH


def test_a_client_that_leaves_while_it_is_failed_is_a_client_that_left() -> None:
    async def scenario() -> bool:
        gate, script = Gate(), Script([7, HANG])
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(call_layer(Accept(script, gate), make_request()))
            await script.hanging.wait()
            gate.fail_all(LOST)
            asking.cancel()
        return asking.cancelled() and gate.count == 0

    assert run_async(scenario())


def test_all_requests_of_a_name_are_cancelled_and_no_others_and_only_once() -> None:
    async def scenario() -> tuple[list[int], dict[str, list[tuple[Reason, Cause | None]]]]:
        gate, calls = Gate(), [Call(request_id=name) for name in ("mine", "mine", "yours")]
        layer = Accept(Script([7, HANG], [7, HANG], [7, HANG]), gate)
        ends: dict[str, list[tuple[Reason, Cause | None]]] = {"mine": [], "yours": []}

        async def ask(call: Call) -> None:
            with pytest.raises(Failure) as caught:
                await layer(make_request(), call, Collected())
            ends[call.request_id].append((caught.value.reason, call.ending.cause))

        async with asyncio.TaskGroup() as group:
            for call in calls:
                group.create_task(ask(call))
            while gate.count < len(calls):
                await asyncio.sleep(0)
            counts = [gate.cancel("mine"), gate.cancel("mine"), gate.cancel("nobody's")]
            while gate.count > 1:
                await asyncio.sleep(0)
            counts.append(gate.cancel("mine"))
            assert not ends["yours"]
            gate.fail_all(LOST)
        return counts, ends

    counts, ends = run_async(scenario())
    assert counts == [2, 0, 0, 0]
    assert ends["mine"] == [(Reason.CANCELLED, Cause.EXPLICIT)] * 2
    assert ends["yours"] == [(Reason.DISCONNECTED, Cause.DRAIN)]


def test_a_timeout_from_below_is_not_taken_for_a_failure_from_outside() -> None:
    with pytest.raises(TimeoutError, match="below"):
        run_async(call_layer(Accept(Script([TimeoutError("below")]), Gate()), make_request()))
