"""How often the log speaks of something that goes on: when it begins, and now and then while it lasts."""

import asyncio

REMIND_S = 30.0
"""Between two lines about the same outage: often enough to be seen in the last page of a log."""


class Reminder:
    """Says when a line is due. Not for threads: it reads the event loop's clock."""

    def __init__(self) -> None:
        self._said_at: float | None = None

    @property
    def is_quiet(self) -> bool:
        """Whether nothing has been said since `reset`."""
        return self._said_at is None

    def take(self) -> bool:
        """Whether a line is due now; it then counts as said."""
        now = asyncio.get_running_loop().time()
        if self._said_at is not None and now - self._said_at < REMIND_S:
            return False
        self._said_at = now
        return True

    def reset(self) -> None:
        """It is over: the next time is a first one."""
        self._said_at = None
