"""Decides when a worker counts as lost although the connection to it is open.

| sign | limit |
| --- | --- |
| no message, with streams on the session | `stall_s` |
| no message, without streams | `idle_stall_s` |
| no step of the engine, with streams and sequences that run | `engine_stall_s` |
| the same in a step that computes a prompt, or while the engine does not say what it computes | `prefill_stall_s` |
| nothing read of what is sent to the worker | `UNTAKEN_S_MAX` of `writer.py` |

A stream that has its finish reason does not count: its worker has nothing to do for it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from services.core.errors import Failure, Reason
from services.stubs import worker_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessConfig:
    """Limits in seconds; the table above says what each is for."""

    stall_s: float = 1.0
    idle_stall_s: float = 10.0
    engine_stall_s: float = 5.0
    prefill_stall_s: float = 60.0


class Liveness:
    """When the worker was last heard, and when its engine last made a step; both absolute, in event-loop time."""

    __slots__ = ("_clock", "_config", "_heard_at", "_load", "_may_prefill", "_name", "_stepped_at")

    def __init__(self, name: str, config: LivenessConfig, clock: Callable[[], float]) -> None:
        """`name`: the worker's, for the failure."""
        self._name = name
        self._config = config
        self._clock = clock
        self._load = worker_pb2.Load()
        self._may_prefill = False
        self._heard_at = self._stepped_at = clock()

    def on_message(self) -> None:
        """Called when a message is processed. While it waited in this process, the worker was not silent."""
        self._heard_at = self._clock()

    def on_step(self) -> None:
        """Called if the message has tokens."""
        self._stepped_at = self._heard_at

    def on_load(self, load: worker_pb2.Load) -> None:
        """Called if the message has a load."""
        has_stepped = load.engine_steps != self._load.engine_steps
        if has_stepped:
            self._stepped_at = self._heard_at
        computes = not load.ranks or any(rank.active_prefill_tokens for rank in load.ranks)
        # A step goes on with a prompt although the request has been cancelled, and is reported no more.
        self._may_prefill = computes or (self._may_prefill and not has_stepped)
        self._load = load

    @property
    def generation_count(self) -> int:
        """How many running requests of the worker this frontend could adopt, as the worker has last reported."""
        return self._load.generations

    def restart(self, now: float) -> None:
        """Count from `now` on: earlier silence and standstill prove nothing."""
        self._heard_at = self._stepped_at = now

    def check(self, now: float, *, has_streams: bool, stuck_at: float) -> float:
        """Return the time at which the worker counts as lost if nothing happens until then.

        `stuck_at`: when it will have read nothing for too long. Raises STALLED if one of the limits is exceeded.
        """
        limit_s = self._config.stall_s if has_streams else self._config.idle_stall_s
        silent_at = self._heard_at + limit_s
        standstill_at = self._standstill_at() if has_streams else math.inf
        if now >= silent_at:
            raise Failure(Reason.STALLED, f"nothing was heard from {self._name} for {limit_s} s")
        if now >= standstill_at:
            raise Failure(Reason.STALLED, f"the engine of {self._name} makes no steps")
        if now >= stuck_at:
            raise Failure(Reason.STALLED, f"{self._name} reads nothing of what is sent to it")
        return min(silent_at, standstill_at, stuck_at)

    def _standstill_at(self) -> float:
        """The time at which the engine will have made no step for too long."""
        if not self._load.running:
            return math.inf
        return self._stepped_at + (self._config.prefill_stall_s if self._may_prefill else self._config.engine_stall_s)
