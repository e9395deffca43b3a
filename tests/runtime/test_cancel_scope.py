"""Scope: what a task is doing can be ended from outside, and the task goes on."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
import pytest

from services.runtime.cancel_scope import CancelScope
from tests.support.doubles import run_async


async def wait_for_ever() -> None:
    await asyncio.Event().wait()


async def cancelled_from_outside(*cancels: Callable[[asyncio.Task[str], CancelScope], object]) -> asyncio.Task[str]:
    """A task that waits in a scope for ever, and then says that it is through, after these cancels in one turn."""
    scope = CancelScope()

    async def work() -> str:
        with scope:
            await wait_for_ever()
        await asyncio.sleep(0)  # Here it would meet a cancel that was left over.
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
    """What it says, and how many cancels it leaves in its task."""

    async def scenario() -> tuple[str, int]:
        said = await work()
        await asyncio.sleep(0)
        task = asyncio.current_task()
        assert task is not None
        return said, task.cancelling()

    return run_async(scenario())


def test_what_nobody_cancels_passes_through() -> None:
    async def work() -> str:
        said = ""
        with CancelScope():
            said += await asyncio.sleep(0, "through")
        return said

    assert in_task(work) == ("through", 0)


def test_a_cancelled_scope_ends_and_its_task_goes_on() -> None:
    async def scenario() -> tuple[str, int]:
        task = await cancelled_from_outside(cancel_scope)
        return task.result(), task.cancelling()

    assert run_async(scenario()) == ("through", 0)


def test_to_cancel_it_twice_is_to_cancel_it_once() -> None:
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
def test_a_task_that_is_cancelled_at_the_same_time_is_cancelled(cancels: tuple[Any, Any]) -> None:
    async def scenario() -> bool:
        return (await cancelled_from_outside(*cancels)).cancelled()

    assert run_async(scenario())


def test_a_task_that_is_cancelled_while_a_cancelled_scope_cleans_up_is_cancelled() -> None:
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


def test_a_scope_opened_while_its_task_is_being_cancelled_ends_alone() -> None:
    """Clean-up may need one: the cancel that was there before is another's."""

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


def test_its_own_task_may_cancel_it_and_ends_at_its_next_wait() -> None:
    async def work() -> str:
        said = "not begun"
        with CancelScope() as scope:
            scope.cancel()
            said = "ends at a wait"
            await wait_for_ever()
        return said

    assert in_task(work) == ("ends at a wait", 0)


def test_its_own_task_may_cancel_it_and_end_before_it_waits() -> None:
    async def work() -> str:
        with CancelScope() as scope:
            scope.cancel()
        await asyncio.sleep(0)
        return "through"

    assert in_task(work) == ("through", 0)


def test_to_cancel_it_after_its_end_does_nothing() -> None:
    async def work() -> str:
        with CancelScope() as scope:
            pass
        scope.cancel()
        await asyncio.sleep(0)
        return "through"

    assert in_task(work) == ("through", 0)


def test_to_cancel_it_before_its_begin_does_nothing() -> None:
    async def work() -> str:
        scope = CancelScope()
        scope.cancel()
        with scope:
            await asyncio.sleep(0)
        return "through"

    assert in_task(work) == ("through", 0)


def test_what_has_ended_in_the_turn_it_is_cancelled_in_has_not_lost_its_result() -> None:
    """It runs on in the next turn, before the cancel does."""

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


def test_what_swallows_the_cancel_keeps_its_result_and_leaves_no_cancel_behind() -> None:
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


def test_an_error_that_comes_of_the_cancel_is_not_swallowed() -> None:
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


def test_a_cancel_that_is_raised_from_below_is_not_its_own() -> None:
    """Such as that of a future which somebody else has cancelled."""

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
def test_of_two_scopes_the_outermost_that_is_cancelled_ends(cancelled: list[str], passed: list[str]) -> None:
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


def test_a_scope_in_a_group_of_tasks_ends_its_own_task_alone() -> None:
    async def work() -> str:
        async with asyncio.TaskGroup() as group:
            with CancelScope(asyncio.get_running_loop()) as scope:
                group.create_task(asyncio.sleep(0)).add_done_callback(lambda _: scope.cancel())
                await wait_for_ever()
            other = group.create_task(asyncio.sleep(0, "through"))
        return other.result()

    assert in_task(work) == ("through", 0)


def test_it_can_be_opened_in_a_task_of_grpcs() -> None:
    async def answer(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        with CancelScope(asyncio.get_running_loop()) as scope:
            scope.cancel()
            await wait_for_ever()
        await asyncio.sleep(0)
        return b"through"

    async def scenario() -> bytes:
        server = grpc.aio.server()
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(answer)
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("s", {"m": handler})])
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/s/m")
                return await method(b"")
        finally:
            await server.stop(None)

    assert run_async(scenario()) == b"through"
