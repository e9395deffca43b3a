"""Starts and stops several child processes together."""

import asyncio
from collections.abc import Coroutine, Sequence

from services.runtime.supervision.child import Child


async def start_all(children: Sequence[Child], group: asyncio.TaskGroup) -> None:
    """Start `children`, supervised in `group`, and return once all serve.

    Raises an exception group with the StartupError of the first child that fails.
    """
    async with asyncio.TaskGroup() as waits:
        for child in children:
            child.start(group)
            waits.create_task(child.wait_serving())


async def stop_all(children: Sequence[Child]) -> None:
    """Stop `children` concurrently. Returns when all have exited."""
    async with asyncio.TaskGroup() as group:
        for child in children:
            group.create_task(child.stop())


async def start_until(stopping: asyncio.Event, start: Coroutine[None, None, None]) -> None:
    """Run `start`, and return once `stopping` is set; `start` is then cancelled if it still runs.

    Raises what `start` raises, in an exception group.
    """
    async with asyncio.TaskGroup() as group:
        starting = group.create_task(start)
        await stopping.wait()
        starting.cancel()
