"""CancelScope ends part of a task from outside, and the task continues."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from services.runtime.cancel_scope import CancelScope
from tests.support.doubles import run_async


async def wait_for_ever() -> None:
    await asyncio.Event().wait()


async def cancelled_from_outside(*cancels: Callable[[asyncio.Task[str], CancelScope], object]) -> asyncio.Task[str]:
    """A task that waits forever in a scope and then returns "through". All `cancels` are called in one iteration."""
    scope = CancelScope()

    async def work() -> str:
        with scope:
            await wait_for_ever()
        await asyncio.sleep(0)  # A cancellation that was left over would be raised here.
        return "through"

    async with asyncio.TaskGroup() as group:
        task = group.create_task(work())
        await asyncio.sleep(0)
        for cancel in cancels:
            cancel(task, scope)
    return task


def cancel_scope(_: asyncio.Task[str], scope: CancelScope) -> None:
    scope.cancel()


def cancel_task(task: asyncio.Task[str], _: CancelScope) -> None:
    task.cancel()


def cancel_task_next_turn(task: asyncio.Task[str], _: CancelScope) -> None:
    asyncio.get_running_loop().call_soon(task.cancel)


def in_task(work: Callable[[], Coroutine[Any, Any, str]]) -> tuple[str, int]:
    """The result of `work`, and the number of cancellations that it leaves pending in its task."""

    async def scenario() -> tuple[str, int]:
        said = await work()
        await asyncio.sleep(0)
        task = asyncio.current_task()
        assert task is not None
        return said, task.cancelling()

    return run_async(scenario())


def test_scope_that_is_not_cancelled_changes_nothing() -> None:
    async def work() -> str:
        said = ""
        with CancelScope():
            said += await asyncio.sleep(0, "through")
        return said

    assert in_task(work) == ("through", 0)


def test_cancelled_scope_ends_and_its_task_continues() -> None:
    async def scenario() -> tuple[str, int]:
        task = await cancelled_from_outside(cancel_scope)
        return task.result(), task.cancelling()

    assert run_async(scenario()) == ("through", 0)


def test_cancel_is_idempotent() -> None:
    async def scenario() -> tuple[str, int]:
        task = await cancelled_from_outside(cancel_scope, cancel_scope)
        return task.result(), task.cancelling()

    assert run_async(scenario()) == ("through", 0)


@pytest.mark.parametrize(
    "cancels",
    [
        (cancel_scope, cancel_task),
        (cancel_task, cancel_scope),
        (cancel_scope, cancel_task_next_turn),
        (cancel_task_next_turn, cancel_scope),
    ],
)
def test_task_cancelled_together_with_its_scope_is_cancelled(cancels: tuple[Any, Any]) -> None:
    async def scenario() -> bool:
        return (await cancelled_from_outside(*cancels)).cancelled()

    assert run_async(scenario())


def test_task_cancelled_during_the_cleanup_of_its_scope_is_cancelled() -> None:
    async def scenario() -> bool:
        scope, is_cleaning = CancelScope(), asyncio.Event()

        async def work() -> None:
            with scope:
                try:
                    await wait_for_ever()
                finally:
                    is_cleaning.set()
                    await wait_for_ever()

        async with asyncio.TaskGroup() as group:
            task = group.create_task(work())
            await asyncio.sleep(0)
            scope.cancel()
            await is_cleaning.wait()
            task.cancel()
        return task.cancelled()

    assert run_async(scenario())


def test_scope_opened_during_cancellation_of_its_task_ends_alone() -> None:
    """Cleanup may need a scope: the earlier cancellation is not the scope's own."""

    async def scenario() -> tuple[list[str], bool]:
        scope, is_cleaning, steps = CancelScope(), asyncio.Event(), []

        async def work() -> None:
            try:
                await wait_for_ever()
            finally:
                with scope:
                    is_cleaning.set()
                    await wait_for_ever()
                steps.append("clean")

        async with asyncio.TaskGroup() as group:
            task = group.create_task(work())
            await asyncio.sleep(0)
            task.cancel()
            await is_cleaning.wait()
            scope.cancel()
        return steps, task.cancelled()

    assert run_async(scenario()) == (["clean"], True)


def test_scope_cancelled_by_its_own_task_ends_at_the_next_await() -> None:
    async def work() -> str:
        said = "not begun"
        with CancelScope() as scope:
            scope.cancel()
            said = "ends at a wait"
            await wait_for_ever()
        return said

    assert in_task(work) == ("ends at a wait", 0)


def test_scope_cancelled_by_its_own_task_may_end_without_an_await() -> None:
    async def work() -> str:
        with CancelScope() as scope:
            scope.cancel()
        await asyncio.sleep(0)
        return "through"

    assert in_task(work) == ("through", 0)


def test_cancel_after_the_end_does_nothing() -> None:
    async def work() -> str:
        with CancelScope() as scope:
            pass
        scope.cancel()
        await asyncio.sleep(0)
        return "through"

    assert in_task(work) == ("through", 0)


def test_cancel_before_the_start_does_nothing() -> None:
    async def work() -> str:
        scope = CancelScope()
        scope.cancel()
        with scope:
            await asyncio.sleep(0)
        return "through"

    assert in_task(work) == ("through", 0)


def test_body_that_ends_in_the_iteration_of_the_cancel_keeps_its_result() -> None:
    """The body continues in the next iteration, before the cancellation is applied."""

    async def scenario() -> tuple[str, int]:
        scope, may_go_on = CancelScope(), asyncio.Event()

        async def work() -> str:
            said = "cancelled"
            with scope:
                await may_go_on.wait()
                said = "ended"
            await asyncio.sleep(0)
            return said

        async with asyncio.TaskGroup() as group:
            task = group.create_task(work())
            await asyncio.sleep(0)
            may_go_on.set()
            await asyncio.sleep(0)
            scope.cancel()
        return task.result(), task.cancelling()

    assert run_async(scenario()) == ("ended", 0)


def test_body_that_swallows_the_cancel_keeps_its_result() -> None:
    async def work() -> str:
        said = ""
        with CancelScope() as scope:
            scope.cancel()
            try:
                await wait_for_ever()
            except asyncio.CancelledError:
                said = "swallowed"
        await asyncio.sleep(0)
        return said

    assert in_task(work) == ("swallowed", 0)


def test_exception_raised_because_of_the_cancel_is_passed_on() -> None:
    async def work() -> str:
        with CancelScope() as scope:
            scope.cancel()
            try:
                await wait_for_ever()
            finally:
                raise ValueError("on the way out")
        return "swallowed"

    with pytest.raises(ValueError, match="on the way out"):
        in_task(work)


def test_cancelled_error_from_the_body_is_passed_on() -> None:
    """Such as that of a future that was cancelled elsewhere."""

    async def scenario() -> bool:
        async def work() -> None:
            with CancelScope():
                raise asyncio.CancelledError

        async with asyncio.TaskGroup() as group:
            task = group.create_task(work())
        return task.cancelled()

    assert run_async(scenario())


@pytest.mark.parametrize(
    ("cancelled", "passed"),
    [
        (["inner"], ["after inner", "after outer"]),
        (["outer"], ["after outer"]),
        (["inner", "outer"], ["after outer"]),
        (["outer", "inner"], ["after outer"]),
    ],
)
def test_outermost_cancelled_scope_ends(cancelled: list[str], passed: list[str]) -> None:
    async def scenario() -> tuple[list[str], int]:
        scopes, steps = {"inner": CancelScope(), "outer": CancelScope()}, []

        async def work() -> None:
            with scopes["outer"]:
                with scopes["inner"]:
                    await wait_for_ever()
                await asyncio.sleep(0)
                steps.append("after inner")
            await asyncio.sleep(0)
            steps.append("after outer")

        async with asyncio.TaskGroup() as group:
            task = group.create_task(work())
            await asyncio.sleep(0)
            for name in cancelled:
                scopes[name].cancel()
        return steps, task.cancelling()

    assert run_async(scenario()) == (passed, 0)


def test_scope_in_a_task_group_ends_only_its_own_body() -> None:
    async def work() -> str:
        async with asyncio.TaskGroup() as group:
            with CancelScope(asyncio.get_running_loop()) as scope:
                group.create_task(asyncio.sleep(0)).add_done_callback(lambda _: scope.cancel())
                await wait_for_ever()
            other = group.create_task(asyncio.sleep(0, "through"))
        return other.result()

    assert in_task(work) == ("through", 0)
