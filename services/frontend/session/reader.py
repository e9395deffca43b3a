"""What a worker has said on a session: joined where much has come, cut where it is about very many streams, and left in
the kernel for a moment where tokens take too much of the frontend's time.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from services.frontend.session.coalesce import coalesce, split
from services.http.server.cork import Cork
from services.rpc.framing import FrameConnection
from services.stubs import worker_pb2

STREAMS_AT_ONCE_MAX = 512
"""Whose tokens are passed on in one turn of the loop, if one worker sends for no more: some milliseconds."""
STREAMS_A_TURN_MAX = 128
"""The same where it sends for more: a probe takes several turns, and there are several workers."""

ENDS_AWAITED_MAX = 128
"""For whose ends the tokens of a read wait, so that each leaves with its last ones: 4 ms."""


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


class ReadThrottle:
    """What tokens have taken of a frontend's time, all sessions together."""

    __slots__ = ("spent_s",)

    def __init__(self) -> None:
        self.spent_s = 0.0


class SessionReader:
    """Messages from one worker, handed over in order. Until all that came are, no more is read."""

    def __init__(self, take: Callable[[worker_pb2.WorkerMessage], bool], throttle: ReadThrottle, cork: Cork) -> None:
        """take: gets one after the other; whether it wants more. It must not raise. cork: of those who write it on."""
        self._take = take
        self._throttle = throttle
        self._cork = cork
        self._loop = asyncio.get_running_loop()
        self._clock = self._loop.time
        self._connection: FrameConnection[worker_pb2.WorkerMessage] | None = None
        self._messages: deque[tuple[int, worker_pb2.WorkerMessage]] = deque()  # Each with the number of its streams.
        self._spent_before_s = self._rested_at = 0.0

    def connect(self, connection: FrameConnection[worker_pb2.WorkerMessage]) -> None:
        """Where they come from, from now on."""
        self._connection = connection

    def add(self, messages: Sequence[worker_pb2.WorkerMessage]) -> None:
        """Those that one read brought."""
        for message in coalesce(messages) if len(messages) > 1 else messages:
            streams = len(message.step.stream_ids)
            if streams > STREAMS_AT_ONCE_MAX:
                self._messages.extend((STREAMS_A_TURN_MAX, piece) for piece in split(message, STREAMS_A_TURN_MAX))
            else:
                self._messages.append((streams, message))
        self._hand_over(lets_end=True)

    def _hand_over(self, *, lets_end: bool = False) -> None:
        """As much as fits a turn of the loop. In one function, for this is what each step costs.

        lets_end: what ends a stream may leave with its last tokens, which wait so long, if it is not too long. That is
        for a read alone: all that are read in one turn come before all that they wake.
        """
        began, left, ends = self._clock(), STREAMS_A_TURN_MAX, 0
        self._cork.hold()
        try:
            while self._messages and left > 0:
                streams, message = self._messages.popleft()
                left -= streams
                ends += len(message.ends)
                if not self._take(message):
                    self._messages.clear()
        finally:
            if lets_end and 0 < ends <= ENDS_AWAITED_MAX:
                self._loop.call_soon(self._pull)
            else:
                self._cork.release()
        now = self._clock()
        self._throttle.spent_s += now - began
        if self._messages:
            self._loop.call_soon(self._hand_over)
        if self._connection is not None:
            self._read_on(self._connection, now)

    def _pull(self) -> None:
        """After the tasks of the streams that have ended."""
        began = self._clock()
        self._cork.release()
        self._throttle.spent_s += self._clock() - began

    def _read_on(self, connection: FrameConnection[worker_pb2.WorkerMessage], now: float) -> None:
        """Unless something waits here; and after a rest, if tokens have taken more than their share of the time."""
        if self._messages:
            connection.pause()
            return
        connection.go_on()
        delay_s = rest_s(self._throttle.spent_s - self._spent_before_s, now - self._rested_at)
        self._spent_before_s, self._rested_at = self._throttle.spent_s, now
        if delay_s:
            connection.rest(delay_s)
