"""Limits how often the log repeats itself: reminders about a lasting condition, and lines per second of one kind."""

import asyncio
import math

REMIND_S = 30.0
"""Time between two lines about the same outage: short enough that the last page of a log shows it."""


class LogThrottle:
    """Decides when to log a lasting condition: when it begins, and every REMIND_S while it lasts. Not thread-safe."""

    def __init__(self) -> None:
        self._logged_at: float | None = None

    @property
    def is_quiet(self) -> bool:
        """Whether nothing has been logged since `reset`."""
        return self._logged_at is None

    def should_log(self) -> bool:
        """Whether to log now. If so, the caller must log, and the next line is due after REMIND_S."""
        now = asyncio.get_running_loop().time()
        if self._logged_at is not None and now - self._logged_at < REMIND_S:
            return False
        self._logged_at = now
        return True

    def reset(self) -> None:
        """The condition has ended: the next call of `should_log` returns True."""
        self._logged_at = None


class LineQuota:
    """Limits lines of one kind to a number per second, and counts the lines that are left out. Not thread-safe."""

    def __init__(self, lines_per_s_max: int) -> None:
        self._lines_per_s_max = lines_per_s_max
        self._since = -math.inf
        self._left = 0
        self._left_out = 0

    def claim(self) -> int | None:
        """Claim one line. Returns the number of lines left out before it, or None if this line must be left out."""
        now = asyncio.get_running_loop().time()
        if now - self._since >= 1:
            self._since, self._left = now, self._lines_per_s_max
        if not self._left:
            self._left_out += 1
            return None
        self._left -= 1
        left_out, self._left_out = self._left_out, 0
        return left_out
