"""Members that start and end together."""

import asyncio
from collections.abc import Coroutine, Sequence

from services.cluster.member import Member


async def start_all(members: Sequence[Member], lives: asyncio.TaskGroup) -> None:
    """Start them, and return once all serve. Raises the StartupError of the first that fails, in a group."""
    async with asyncio.TaskGroup() as waits:
        for member in members:
            member.start(lives)
            waits.create_task(member.wait_serving())


async def end_all(members: Sequence[Member]) -> None:
    """End them side by side."""
    async with asyncio.TaskGroup() as group:
        for member in members:
            group.create_task(member.end())


async def start_until(stopping: asyncio.Event, start: Coroutine[None, None, None]) -> None:
    """Run `start`, and return once `stopping` is set, be `start` done or not. Raises what it does, in a group."""
    async with asyncio.TaskGroup() as group:
        starting = group.create_task(start)
        await stopping.wait()
        starting.cancel()
