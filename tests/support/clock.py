"""How long tests wait, and a clock that the test controls: event-loop time passes only when the test says so."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

WAIT_S = 60.0
"""How long tests wait for what must happen, on a machine whose processors are all busy.

Only failures take this long: no test measures time by it, and none waits for it to pass.
"""


class _NonBlockingSelector(selectors.DefaultSelector):
    """A selector that never blocks: time does not pass by itself, so a wait would never end."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout == 0, "the loop has nothing to do, and the test waits for something"
        return super().select(timeout)


class ClockedLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only by `pass_time`.

    Timers that become due together fire in the loop's next turn, after the callbacks that are already scheduled.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__(_NonBlockingSelector())

    def time(self) -> float:
        return self.now_s


def run_clocked(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine on a ClockedLoop."""
    with asyncio.Runner(loop_factory=ClockedLoop) as runner:
        return runner.run(coroutine)


def pass_time(seconds: float) -> None:
    """Advance the time. Timers that become due fire in the next turn of the loop."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, ClockedLoop)
    loop.now_s += seconds


async def settle() -> None:
    """Let the loop run for several turns, until all callbacks that are ready have run."""
    for _ in range(6):
        await asyncio.sleep(0)
