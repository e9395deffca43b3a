"""Receives a worker's messages and hands them to the session one by one.

Messages that arrive together are merged. A message about very many streams is cut, so that no turn of the event loop
takes long. When tokens take too much of the frontend's time, what the worker sends waits in the kernel for a moment.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from services.frontend.session.coalesce import coalesce, split
from services.http.server.cork import Cork
from services.rpc.framing import FrameConnection
from services.stubs import worker_pb2

STREAMS_AT_ONCE_MAX = 512
"""A message with tokens for at most this many streams is handled in one turn of the event loop: some milliseconds."""
STREAMS_A_TURN_MAX = 128
"""A message about more streams is cut into parts of this size, one a turn: other tasks and workers run in between."""

ENDS_AWAITED_MAX = 128
"""Writes wait for up to this many ends of one read, so that each end leaves with the last tokens of its stream. To wait
for more would take over 4 ms."""

TOKENS_SHARE_MAX = 0.2
"""The share of the event loop's time that tokens may take before sessions read less often."""
REST_S_MAX = 0.01
"""The longest pause between two reads. A token is delayed by less than two steps of a fast engine."""
REST_S_MIN = 0.0005
"""A shorter pause is left out: timers of the event loop are no finer than a millisecond."""


def rest_s(spent_s: float, elapsed_s: float) -> float:
    """How long a session pauses before its next read; 0: not at all.

    `spent_s`: time that tokens of all sessions took during the `elapsed_s` since this session last computed its pause.
    """
    wanted_s = spent_s / TOKENS_SHARE_MAX - elapsed_s
    return 0.0 if wanted_s < REST_S_MIN else min(wanted_s, REST_S_MAX)


class ReadThrottle:
    """The time that tokens of all sessions of a frontend have taken so far."""

    __slots__ = ("spent_s",)

    def __init__(self) -> None:
        self.spent_s = 0.0


class SessionReader:
    """Hands the messages of one worker over in order. While some of them wait, no more is read from the connection."""

    def __init__(self, handle: Callable[[worker_pb2.WorkerMessage], bool], throttle: ReadThrottle, cork: Cork) -> None:
        """`handle`: called with each message; returns whether it wants more. It must not raise.

        `cork`: holds back what `handle` writes to clients until all messages of a turn are handled.
        """
        self._handle = handle
        self._throttle = throttle
        self._cork = cork
        self._loop = asyncio.get_running_loop()
        self._clock = self._loop.time
        self._connection: FrameConnection[worker_pb2.WorkerMessage] | None = None
        self._messages: deque[tuple[int, worker_pb2.WorkerMessage]] = deque()  # Each with the number of its streams.
        self._spent_before_s = self._rested_at = 0.0

    def connect(self, connection: FrameConnection[worker_pb2.WorkerMessage]) -> None:
        """Set the connection whose reading is paused and resumed."""
        self._connection = connection

    def on_messages(self, messages: Sequence[worker_pb2.WorkerMessage]) -> None:
        """Called with the messages of one read."""
        for message in coalesce(messages) if len(messages) > 1 else messages:
            streams = len(message.step.stream_ids)
            if streams > STREAMS_AT_ONCE_MAX:
                self._messages.extend((STREAMS_A_TURN_MAX, part) for part in split(message, STREAMS_A_TURN_MAX))
            else:
                self._messages.append((streams, message))
        self._hand_over(awaits_ends=True)

    def _hand_over(self, *, awaits_ends: bool = False) -> None:
        """Handle as many messages as fit into a turn of the event loop.

        This is one function because it runs for every step. `awaits_ends`: writes wait until the tasks of the streams
        that end here have run, unless these are too many. Only a read does so: the event loop calls all reads of a turn
        before the tasks that they wake.
        """
        began, left, ends = self._clock(), STREAMS_A_TURN_MAX, 0
        self._cork.hold()
        try:
            while self._messages and left > 0:
                streams, message = self._messages.popleft()
                left -= streams
                ends += len(message.ends)
                if not self._handle(message):
                    self._messages.clear()
        finally:
            if awaits_ends and 0 < ends <= ENDS_AWAITED_MAX:
                self._loop.call_soon(self._uncork)
            else:
                self._cork.release()
        now = self._clock()
        self._throttle.spent_s += now - began
        if self._messages:
            self._loop.call_soon(self._hand_over)
        if self._connection is not None:
            self._read_on(self._connection, now)

    def _uncork(self) -> None:
        """Runs after the tasks of the streams that have ended."""
        began = self._clock()
        self._cork.release()
        self._throttle.spent_s += self._clock() - began

    def _read_on(self, connection: FrameConnection[worker_pb2.WorkerMessage], now: float) -> None:
        """Read on unless messages wait here; after a pause if tokens have taken more than their share of the time."""
        if self._messages:
            connection.pause()
            return
        connection.resume()
        delay_s = rest_s(self._throttle.spent_s - self._spent_before_s, now - self._rested_at)
        self._spent_before_s, self._rested_at = self._throttle.spent_s, now
        if delay_s:
            connection.pause_for(delay_s)
