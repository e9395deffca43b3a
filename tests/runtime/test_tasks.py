"""What stands in groups of exceptions, however deep."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from services.runtime.tasks import TaskSet, leaf_of, root_cause
from tests.support.doubles import run_async


def test_finds_the_first_exception_that_is_no_group() -> None:
    first, second = ValueError("first"), ValueError("second")

    assert leaf_of(ExceptionGroup("outer", [ExceptionGroup("inner", [first]), second])) is first


def test_an_exception_alone_is_itself() -> None:
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
    """Nobody needs to hear of a bug."""


async def wait_for_ever() -> None:
    await asyncio.Event().wait()


async def fail() -> None:
    raise ValueError("bug")


def bug() -> None:
    raise ValueError("on the way out")


class CleanUp:
    """Work that takes its time to end when it is cancelled."""

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


def test_each_end_is_waited_for_anew_and_what_has_ended_is_forgotten() -> None:
    async def scenario() -> tuple[list[str], set[asyncio.Task[Any]]]:
        beside, steps = TaskSet(nothing), []

        async def work(name: str) -> None:
            await asyncio.sleep(0)
            steps.append(name)

        for name in ("first", "second"):
            beside.start(work(name))
            await beside.wait_ended()
            steps.append("ended")
        await beside.end()
        return steps, others()

    assert run_async(scenario()) == (["first", "ended", "second", "ended"], set())


def test_one_that_is_cancelled_ends_alone() -> None:
    async def scenario() -> int:
        beside = TaskSet(nothing)
        cancel = beside.start(wait_for_ever())
        beside.start(wait_for_ever())
        await asyncio.sleep(0)
        cancel()
        await beside.wait_ended()
        left = len(others())
        await beside.end()
        return left

    assert run_async(scenario()) == 1


def test_none_outlives_its_owner() -> None:
    async def scenario() -> tuple[bool, set[asyncio.Task[Any]]]:
        beside, work = TaskSet(nothing), CleanUp()
        beside.start(work())
        beside.start(wait_for_ever())
        await asyncio.sleep(0)
        work.may_end.set()
        await beside.end()
        return work.is_clean, others()

    assert run_async(scenario()) == (True, set())


def test_clean_up_is_not_disturbed_by_the_end() -> None:
    async def scenario() -> bool:
        beside, work = TaskSet(nothing), CleanUp()
        cancel = beside.start(work())
        await asyncio.sleep(0)
        cancel()
        await work.is_cleaning.wait()
        asyncio.get_running_loop().call_soon(work.may_end.set)
        await beside.end()
        return work.is_clean

    assert run_async(scenario())


def test_a_bug_is_told_at_once_and_raised_at_the_end() -> None:
    async def scenario() -> set[asyncio.Task[Any]]:
        heard = asyncio.Event()
        beside = TaskSet(heard.set)
        beside.start(fail())
        beside.start(wait_for_ever())
        await heard.wait()
        with pytest.raises(ValueError, match="bug"):
            await beside.end()
        return others()

    assert run_async(scenario()) == set()


def test_a_bug_on_the_way_out_is_raised_too() -> None:
    async def scenario() -> None:
        beside, work = TaskSet(nothing), CleanUp(then=bug)
        beside.start(work())
        await asyncio.sleep(0)
        work.may_end.set()
        await beside.end()

    with pytest.raises(ValueError, match="on the way out"):
        run_async(scenario())


def test_the_first_bug_counts() -> None:
    async def scenario() -> None:
        beside = TaskSet(nothing)
        beside.start(fail())
        await beside.wait_ended()
        beside.start(fail_otherwise())
        await beside.wait_ended()
        await beside.end()

    async def fail_otherwise() -> None:
        raise KeyError

    with pytest.raises(ValueError, match="bug"):
        run_async(scenario())


@pytest.mark.parametrize("then", [nothing, bug], ids=["well", "with a bug"])
def test_an_owner_that_is_cancelled_while_it_waits_waits_on_and_is_cancelled_then(then: Callable[[], None]) -> None:
    async def scenario() -> tuple[bool, bool, set[asyncio.Task[Any]]]:
        work = CleanUp(then)

        async def own() -> None:
            beside = TaskSet(nothing)
            beside.start(work())
            await asyncio.sleep(0)
            await beside.end()

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


def test_an_owner_that_was_cancelled_before_stays_cancelled_whatever_its_tasks_do() -> None:
    async def scenario() -> bool:
        work = CleanUp(then=bug)

        async def own() -> None:
            beside = TaskSet(nothing)
            beside.start(work())
            try:
                await wait_for_ever()
            finally:
                await beside.end()

        owner = asyncio.ensure_future(own())
        await asyncio.sleep(0)
        owner.cancel()
        await work.is_cleaning.wait()
        work.may_end.set()
        await asyncio.wait([owner])
        return owner.cancelled()

    assert run_async(scenario())
