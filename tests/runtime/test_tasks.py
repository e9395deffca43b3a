"""wait_event waits for a bounded time. leaf_of finds the cause in nested exception groups. TaskSet never outlives its
owner, and reports every exception.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from services.runtime.tasks import TaskSet, leaf_of, root_cause, wait_event
from tests.support.doubles import run_async


@pytest.mark.parametrize("is_set", [True, False])
def test_wait_event_returns_whether_the_event_was_set_in_time(is_set: bool) -> None:
    async def scenario() -> bool:
        event = asyncio.Event()
        if is_set:
            asyncio.get_running_loop().call_soon(event.set)
        return await wait_event(event, 60.0 if is_set else 0.001)

    assert run_async(scenario()) is is_set


def test_wait_event_passes_a_cancellation_on() -> None:
    async def scenario() -> bool:
        waiting = asyncio.create_task(wait_event(asyncio.Event(), 60.0))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        return waiting.cancelled()

    assert run_async(scenario())


def test_leaf_of_finds_the_first_exception_in_nested_groups() -> None:
    first, second = ValueError("first"), ValueError("second")

    assert leaf_of(ExceptionGroup("outer", [ExceptionGroup("inner", [first]), second])) is first


def test_leaf_of_an_exception_is_the_exception_itself() -> None:
    alone = ValueError("alone")

    assert leaf_of(alone) is alone


def test_the_root_cause_of_nested_groups_is_the_first_exception() -> None:
    lost = ValueError("lost")

    async def scenario() -> BaseException:
        return root_cause(ExceptionGroup("", [ExceptionGroup("", [lost]), ValueError()]))

    assert run_async(scenario()) is lost


def test_the_root_cause_is_the_cancellation_if_one_came_at_the_same_time() -> None:
    """Bug: a process did not end, because the loop around the group went on."""
    lost = ValueError("lost")

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
                    raise lost
            except ExceptionGroup as group_:
                raise root_cause(group_) from None

        async with asyncio.TaskGroup() as group:
            owning = group.create_task(owner())
            await is_cleaning.wait()
            owning.cancel()
            may_end.set()

        assert owning.cancelled()

    run_async(scenario())


def nothing() -> None:
    """A callback that does nothing."""


async def wait_for_ever() -> None:
    await asyncio.Event().wait()


async def fail() -> None:
    raise ValueError("bug")


def bug() -> None:
    raise ValueError("on the way out")


class CleanUp:
    """Work whose cleanup, when it is cancelled, waits for `may_end`."""

    def __init__(self, then: Callable[[], None] = nothing) -> None:
        self.is_cleaning, self.may_end = asyncio.Event(), asyncio.Event()
        self.is_clean = False
        self._then = then

    async def __call__(self) -> None:
        try:
            await wait_for_ever()
        finally:
            self.is_cleaning.set()
            await self.may_end.wait()
            self.is_clean = True
            self._then()


def others() -> set[asyncio.Task[Any]]:
    return asyncio.all_tasks() - {asyncio.current_task()}


def test_wait_ended_returns_once_for_each_task_that_ends() -> None:
    async def scenario() -> tuple[list[str], set[asyncio.Task[Any]]]:
        tasks, steps = TaskSet(nothing), []

        async def work(name: str) -> None:
            await asyncio.sleep(0)
            steps.append(name)

        for name in ("first", "second"):
            tasks.start(work(name))
            await tasks.wait_ended()
            steps.append("ended")
        await tasks.end()
        return steps, others()

    assert run_async(scenario()) == (["first", "ended", "second", "ended"], set())


def test_start_returns_a_function_that_cancels_only_its_task() -> None:
    async def scenario() -> int:
        tasks = TaskSet(nothing)
        cancel = tasks.start(wait_for_ever())
        tasks.start(wait_for_ever())
        await asyncio.sleep(0)
        cancel()
        await tasks.wait_ended()
        left = len(others())
        await tasks.end()
        return left

    assert run_async(scenario()) == 1


def test_end_waits_until_every_task_has_ended() -> None:
    async def scenario() -> tuple[bool, set[asyncio.Task[Any]]]:
        tasks, work = TaskSet(nothing), CleanUp()
        tasks.start(work())
        tasks.start(wait_for_ever())
        await asyncio.sleep(0)
        work.may_end.set()
        await tasks.end()
        return work.is_clean, others()

    assert run_async(scenario()) == (True, set())


def test_end_does_not_cancel_a_task_that_is_already_cleaning_up() -> None:
    async def scenario() -> bool:
        tasks, work = TaskSet(nothing), CleanUp()
        cancel = tasks.start(work())
        await asyncio.sleep(0)
        cancel()
        await work.is_cleaning.wait()
        asyncio.get_running_loop().call_soon(work.may_end.set)
        await tasks.end()
        return work.is_clean

    assert run_async(scenario())


def test_exception_of_a_task_is_reported_at_once_and_raised_by_end() -> None:
    async def scenario() -> set[asyncio.Task[Any]]:
        heard = asyncio.Event()
        tasks = TaskSet(heard.set)
        tasks.start(fail())
        tasks.start(wait_for_ever())
        await heard.wait()
        with pytest.raises(ValueError, match="bug"):
            await tasks.end()
        return others()

    assert run_async(scenario()) == set()


def test_exception_during_cleanup_is_raised_by_end() -> None:
    async def scenario() -> None:
        tasks, work = TaskSet(nothing), CleanUp(then=bug)
        tasks.start(work())
        await asyncio.sleep(0)
        work.may_end.set()
        await tasks.end()

    with pytest.raises(ValueError, match="on the way out"):
        run_async(scenario())


def test_end_raises_the_first_exception() -> None:
    async def scenario() -> None:
        tasks = TaskSet(nothing)
        tasks.start(fail())
        await tasks.wait_ended()
        tasks.start(fail_otherwise())
        await tasks.wait_ended()
        await tasks.end()

    async def fail_otherwise() -> None:
        raise KeyError

    with pytest.raises(ValueError, match="bug"):
        run_async(scenario())


@pytest.mark.parametrize("then", [nothing, bug], ids=["well", "with a bug"])
def test_owner_cancelled_during_end_still_waits_for_its_tasks(then: Callable[[], None]) -> None:
    async def scenario() -> tuple[bool, bool, set[asyncio.Task[Any]]]:
        work = CleanUp(then)

        async def own() -> None:
            tasks = TaskSet(nothing)
            tasks.start(work())
            await asyncio.sleep(0)
            await tasks.end()

        owner = asyncio.ensure_future(own())
        await work.is_cleaning.wait()
        for _ in range(2):
            owner.cancel()
            await asyncio.sleep(0)
        was_done = owner.done()
        work.may_end.set()
        await asyncio.wait([owner])
        return was_done, owner.cancelled(), others()

    assert run_async(scenario()) == (False, True, set())


def test_owner_cancelled_before_end_stays_cancelled_even_if_a_task_fails() -> None:
    async def scenario() -> bool:
        work = CleanUp(then=bug)

        async def own() -> None:
            tasks = TaskSet(nothing)
            tasks.start(work())
            try:
                await wait_for_ever()
            finally:
                await tasks.end()

        owner = asyncio.ensure_future(own())
        await asyncio.sleep(0)
        owner.cancel()
        await work.is_cleaning.wait()
        work.may_end.set()
        await asyncio.wait([owner])
        return owner.cancelled()

    assert run_async(scenario())
