"""How often the log speaks of something that goes on: when it begins, and now and then while it lasts."""

import asyncio
import math

REMIND_S = 30.0
"""Between two lines about the same outage: often enough to be seen in the last page of a log."""


class LogThrottle:
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


class Quota:
    """So many lines of a kind in a second, and no more: the next one tells how many were left out. Not for threads."""

    def __init__(self, lines_per_s_max: int) -> None:
        self._lines_per_s_max = lines_per_s_max
        self._since = -math.inf
        self._left = 0
        self._left_out = 0

    def take(self) -> int | None:
        """How many lines were left out before this one; None: this one is left out as well."""
        now = asyncio.get_running_loop().time()
        if now - self._since >= 1:
            self._since, self._left = now, self._lines_per_s_max
        if not self._left:
            self._left_out += 1
            return None
        self._left -= 1
        left_out, self._left_out = self._left_out, 0
        return left_out
