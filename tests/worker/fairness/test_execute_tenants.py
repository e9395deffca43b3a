"""Execute: each token is charged to its tenant, a tenant's own limit bounds its wait, and who gives way is told so."""

import asyncio
from typing import Any

import pytest

from services.core.choice_group import ChoiceGroup
from services.core.errors import Failure, Reason, RefusedFor
from services.core.tenant import Tenant
from tests.support.clock import pass_time, settle
from tests.worker.test_execute import Case, play

A, B = Tenant(name="a"), Tenant(name="b")


def send(case: Case, tenant: Tenant, prompt: int, **fields: Any) -> asyncio.Task[Any]:
    return case.send(prompt, {"tenant": tenant, **fields})


def usage(case: Case) -> dict[str, tuple[int, int, int]]:
    """Label → tokens of prompts and of answers, and how many wait."""
    return {
        label: (one.input_tokens, one.output_tokens, one.waiting_count) for label, one in case.execute.usage().items()
    }


def test_tokens_are_charged_to_their_tenant_as_they_leave_the_engine() -> None:
    async def scenario(case: Case) -> None:
        tasks = [send(case, A, 1), send(case, B, 2), send(case, B, 3)]
        await settle()
        assert usage(case) == {"a": (1, 0, 0), "b": (1, 0, 1)}
        case.engine.give(case.key(1), [7, 8])
        case.engine.give(case.key(2), [7])
        assert usage(case) == {"a": (1, 2, 0), "b": (1, 1, 1)}
        for task in tasks:
            task.cancel()

    play(scenario, slots=2, places=1)


def test_next_slot_goes_to_the_tenant_that_has_had_less() -> None:
    async def scenario(case: Case) -> list[int]:
        tasks = [send(case, A, 1), send(case, A, 2), send(case, B, 3)]
        await settle()
        case.engine.give(case.key(1), [7, 8, 9])
        case.finish(1)
        await settle()
        started = case.running()
        for task in tasks:
            task.cancel()
        return started

    assert play(scenario, slots=1, places=2) == [3]


@pytest.mark.parametrize(("own_s", "wait_s"), [(2.0, 2.0), (9.0, 5.0), (None, 5.0), (0.0, 0.0)])
def test_wait_is_bounded_by_the_limit_of_the_tenant_or_of_the_worker_whichever_is_less(
    own_s: float | None, wait_s: float
) -> None:
    async def scenario(case: Case) -> Any:
        tenant = Tenant(name="a", queue_timeout_s=own_s)
        running, waiting = send(case, tenant, 1), send(case, tenant, 2)
        await settle()
        pass_time(max(wait_s - 0.5, 0))
        await settle()
        assert waiting.done() is (wait_s == 0)
        pass_time(0.5)
        failure = await waiting
        running.cancel()
        return failure

    failure = play(scenario, wait_s=5.0)

    assert (failure.metadata["cause"], failure.metadata["queue_timeout_s"]) == ("queue_timeout", f"{wait_s:g}")
    assert f"waited {wait_s:g} s" in failure.detail


def test_slot_freed_before_a_late_timer_fires_does_not_go_to_a_request_past_its_tenants_limit() -> None:
    async def scenario(case: Case) -> Any:
        running, waiting = send(case, A, 1), send(case, Tenant(name="b", queue_timeout_s=2.0), 2)
        await settle()
        pass_time(3.0)
        case.finish(1)
        await running
        return await waiting, len(case.engine.submitted)

    failure, submitted = play(scenario, wait_s=60.0)

    assert (failure.metadata["cause"], submitted) == ("queue_timeout", 1)


def test_request_that_gives_way_fails_at_once_and_is_counted_as_refused() -> None:
    async def scenario(case: Case) -> Any:
        tasks = [send(case, A, prompt) for prompt in (1, 2, 3)]
        await settle()
        tasks.append(send(case, B, 4))
        failure = await tasks[2]
        assert case.counts == (1, 2)
        assert case.execute.counters.refused == 1
        assert [task.done() for task in tasks] == [False, False, True, False]
        for task in tasks:
            task.cancel()
        return failure

    failure = play(scenario, slots=1, places=2)

    assert isinstance(failure, Failure)
    assert failure.reason is Reason.WORKER_AT_CAPACITY
    assert dict(failure.metadata) == {
        "cause": RefusedFor.TENANT_SHARE,
        "engine_request_limit": "1",
        "request_queue_limit": "2",
        "running": "1",
        "waiting": "2",
    }


def test_all_choices_of_a_group_that_gives_way_fail_also_those_that_arrive_later() -> None:
    async def scenario(case: Case) -> Any:
        tasks = [send(case, A, prompt) for prompt in (1, 2)]
        await settle()
        group = ChoiceGroup(3)
        choices = [case.send(3, {"tenant": A, "choice_group": group}, choice=choice) for choice in (0, 1)]
        await settle()
        assert case.counts == (1, 4)
        newcomer = send(case, B, 4)
        failures = [await choice for choice in choices]
        failures.append(await case.send(3, {"tenant": A, "choice_group": group}, choice=2))
        assert case.counts == (1, 2)
        assert case.execute.counters.refused == 3
        for task in (*tasks, newcomer):
            task.cancel()
        return failures

    failures = play(scenario, slots=1, places=4)

    assert [failure.metadata["cause"] for failure in failures] == ["tenant_share"] * 3


def test_request_that_gave_way_in_the_turn_of_its_cancel_frees_nothing_twice() -> None:
    async def scenario(case: Case) -> None:
        tasks = [send(case, A, prompt) for prompt in (1, 2, 3)]
        await settle()
        tasks[2].cancel()
        newcomer = send(case, B, 4)
        await settle()
        assert case.counts == (1, 2)
        for task in (*tasks, newcomer):
            task.cancel()

    play(scenario, slots=1, places=2)
