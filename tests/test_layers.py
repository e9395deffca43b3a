"""Layers: what is shared by all of them."""

import asyncio

from services.errors import Failure, Reason
from services.layers import root_cause

LOST = Failure(Reason.DISCONNECTED, "lost")


def test_the_root_cause_of_nested_groups_is_the_first_exception() -> None:
    async def scenario() -> BaseException:
        return root_cause(ExceptionGroup("", [ExceptionGroup("", [LOST]), ValueError()]))

    assert asyncio.run(scenario()) is LOST


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

    asyncio.run(scenario())
