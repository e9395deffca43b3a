"""Waits for a condition by polling: the tests observe other processes only through logs, files and metrics."""

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

from tests.support.clock import WAIT_S

POLL_S = 0.01


async def until(condition: Callable[[], Any], seconds_max: float = WAIT_S) -> Any:
    """Wait until `condition` is true, awaiting its value if necessary; return the value."""
    async with asyncio.timeout(seconds_max):
        while True:
            value = condition()
            if inspect.isawaitable(value):
                value = await value
            if value:
                return value
            await asyncio.sleep(POLL_S)


def wait_until(condition: Callable[[], Any], seconds_max: float = WAIT_S) -> Any:
    """Wait like `until`, outside an event loop."""
    give_up_at = time.monotonic() + seconds_max
    while not (value := condition()):
        assert time.monotonic() < give_up_at, f"not within {seconds_max} s: {inspect.getsource(condition)}"
        time.sleep(POLL_S)
    return value
