"""Gate: a draining process takes no new requests, and its running requests can be counted, cancelled and failed."""

import asyncio

import pytest

from services.core.call import Call, Cause
from services.core.common_layers import Accept, Deadline
from services.core.errors import Failure, Reason
from services.core.gate import Gate
from services.core.tenant import EVERYBODY, Tenant
from tests.support.doubles import HANG, Collected, Script, call_layer, make_request, run_async

LOST = Failure(Reason.DISCONNECTED, "lost")


def test_a_draining_process_refuses_new_requests_and_lets_running_ones_finish() -> None:
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


def test_the_gate_is_quiet_once_the_last_request_has_left() -> None:
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


def test_a_request_can_be_cancelled_after_another_with_its_id_has_ended() -> None:
    gate, first, second = Gate(), Call(request_id="r"), Call(request_id="r")
    gate.enter(first)
    gate.enter(second)
    gate.leave(first)

    assert gate.cancel("r", EVERYBODY) == 1

    assert (first.ending.failure, second.ending.cause) == (None, Cause.EXPLICIT)


def test_running_requests_can_be_failed_from_outside() -> None:
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


def test_all_requests_with_an_id_are_cancelled_once_and_no_others() -> None:
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
            counts = [gate.cancel("mine", EVERYBODY), gate.cancel("mine", EVERYBODY), gate.cancel("unknown", EVERYBODY)]
            while gate.count > 1:
                await asyncio.sleep(0)
            counts.append(gate.cancel("mine", EVERYBODY))
            assert not ends["yours"]
            gate.fail_all(LOST)
        return counts, ends

    counts, ends = run_async(scenario())
    assert counts == [2, 0, 0, 0]
    assert ends["mine"] == [(Reason.CANCELLED, Cause.EXPLICIT)] * 2
    assert ends["yours"] == [(Reason.DISCONNECTED, Cause.DRAIN)]


def test_a_tenant_cancels_none_but_its_own_requests() -> None:
    gate = Gate()
    acme, other = Tenant(name="acme"), Tenant(name="other")
    calls = [Call(request_id="r", tenant=tenant) for tenant in (acme, other, EVERYBODY)]
    for call in calls:
        gate.enter(call)

    assert gate.cancel("r", acme) == 1

    assert [call.ending.failure is not None for call in calls] == [True, False, False]
    assert [gate.cancel("r", acme), gate.cancel("r", other), gate.cancel("r", EVERYBODY)] == [0, 1, 1]


def test_requests_with_the_same_id_leave_one_by_one_in_any_order() -> None:
    gate, calls = Gate(), [Call(request_id="same") for _ in range(3)]
    for call in calls:
        gate.enter(call)

    counts = []
    for call in (calls[1], calls[0], calls[2]):
        gate.leave(call)
        counts.append((gate.count, gate.cancel("same", EVERYBODY)))

    assert counts == [(2, 2), (1, 0), (0, 0)]
