"""One move of a request from a worker to another, and what is told of it."""

import logging
from dataclasses import dataclass
from typing import Protocol

import structlog

from services.core.errors import Reason
from services.runtime.loop import clock

log = structlog.get_logger()


class MigrationMetrics(Protocol):
    """What is counted about moves; `has_tokens` tells an ongoing request from a new one."""

    def count_move(self, model: str, *, has_tokens: bool, recomputed: int) -> None: ...

    def observe_move(self, model: str, *, has_tokens: bool, outcome: str, seconds: float) -> None: ...

    def count_exceeded(self, model: str) -> None: ...

    def set_limit(self, model: str, limit: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Move:
    """A move under way: why, from where, since when, and how much the next worker has to compute.

    has_tokens: the client has some already. since: in loop time.
    """

    request_id: str
    model: str
    reason: Reason
    away_from: str | None
    since: float
    has_tokens: bool
    recomputed: int

    def fail(self, metrics: MigrationMetrics, outcome: str) -> None:
        """It led nowhere. outcome: "failure", or "cancelled"."""
        seconds = clock() - self.since
        metrics.observe_move(self.model, has_tokens=self.has_tokens, outcome=outcome, seconds=seconds)

    def succeed(self, metrics: MigrationMetrics, to: str | None, position: int) -> None:
        """The next token has come, from there, with that position."""
        seconds = clock() - self.since
        metrics.observe_move(self.model, has_tokens=self.has_tokens, outcome="success", seconds=seconds)
        metrics.count_move(self.model, has_tokens=self.has_tokens, recomputed=self.recomputed)
        log.log(
            logging.INFO if self.reason is Reason.DRAINING else logging.WARNING,
            "request moved",
            request_id=self.request_id,
            away_from=self.away_from,
            to=to,
            reason=self.reason,
            position=position,
            gap_ms=round(seconds * 1e3, 1),
        )
