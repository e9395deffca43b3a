"""How often a frontend looks for tokens: as soon as they are there, unless they take it too much of its time.

With many streams, most of what a token costs is the write to its client. So a session that has been read rests until
the tokens of all sessions have taken no more than their share of the time since it last was; what comes meanwhile is
joined, and a write carries more. The requests that come have the other share, in a burst too.
"""

TOKENS_SHARE_MAX = 0.2
"""Of the loop's time, for tokens."""
REST_S_MAX = 0.01
"""What a token may come later for it: less than two steps of a quick engine."""
REST_S_MIN = 0.0005
"""A shorter rest is none: the loop's timers are no finer than a millisecond."""


def rest_s(spent_s: float, elapsed_s: float) -> float:
    """How long a session rests. spent_s: on tokens of all sessions, in the `elapsed_s` since it last began to rest."""
    wanted_s = spent_s / TOKENS_SHARE_MAX - elapsed_s
    return 0.0 if wanted_s < REST_S_MIN else min(wanted_s, REST_S_MAX)


class Pace:
    """What tokens have taken of a frontend's time, all sessions together."""

    __slots__ = ("spent_s",)

    def __init__(self) -> None:
        self.spent_s = 0.0
