"""Bounds of what costs a server something and a client nothing: floods of frames, and streams that are reset at once.

What a well-behaved client does is proportional to what it gets, or to time, so a budget is refilled by both.
"""

from services.http.h2.settings import STREAMS_MAX
from services.http.h2.wire.frames import ErrorCode, H2Error
from services.runtime.loop import clock

CONTROL_FRAMES_MAX = 2_048
"""Frames of one connection without content, such as PING, SETTINGS, WINDOW_UPDATE and empty DATA, ahead of their
refill. Content that is sent earns CONTROL_FRAMES_EARNED for each piece, of which a message has two: clients measure
their line with a PING, and open two windows, for each message."""
CONTROL_FRAMES_EARNED = 2
CONTROL_FRAMES_PER_S = 200.0
SMALL_BYTES = 64
SMALL_COST = 1 / 16
"""What a DATA frame of fewer bytes costs beside an empty one: a body may come in small pieces, but not in millions."""
STREAMS_A_FRAME = 16
"""Streams whose window a setting may change for what another frame costs."""
RESETS_MAX = 2 * STREAMS_MAX
"""Streams of one connection that the client resets, or breaks so that we must, ahead of their refill: a client that
leaves all its streams at once may do that twice. Each answer that is sent whole earns one."""
RESETS_PER_S = 100.0


class Budget:
    """An amount that is spent, and refilled by time and by what is earned."""

    __slots__ = ("_amount_max", "_left", "_per_s", "_refilled_at", "_what")

    def __init__(self, what: str, amount_max: int, per_s: float) -> None:
        """`what`: names what is bounded, for the client's developer."""
        self._what = what
        self._amount_max = amount_max
        self._per_s = per_s
        self._left = float(amount_max)
        self._refilled_at = clock()

    def spend(self, cost: float = 1) -> None:
        """Raises H2Error if nothing is left."""
        self._left -= cost
        if self._left >= 0:
            return
        now = clock()
        self._left = min(self._amount_max, self._left + (now - self._refilled_at) * self._per_s)
        self._refilled_at = now
        if self._left < 0:
            raise H2Error(ErrorCode.ENHANCE_YOUR_CALM, f"too many {self._what}")

    def earn(self, amount: float) -> None:
        """Refill by `amount`."""
        self._left = min(self._amount_max, self._left + amount)
