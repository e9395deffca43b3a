"""One move of a request from one worker to another, and how it is reported."""

import logging
from dataclasses import dataclass
from typing import Protocol

import structlog

from services.core.errors import Reason
from services.runtime.loop import clock

log = structlog.get_logger()


class MigrationMetrics(Protocol):
    """The metrics of migration. `has_tokens` tells an ongoing request from a new one.

    `is_exact`: the rest of the answer is the one that would have come without the move.
    """

    def count_move(self, model: str, *, has_tokens: bool, recomputed: int, is_exact: bool) -> None: ...

    def observe_move(self, model: str, *, has_tokens: bool, outcome: str, seconds: float) -> None: ...

    def count_exceeded(self, model: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Move:
    """A move in progress.

    `away_from`: the key of the old session.
    `since`: when the worker was lost or, if it drains, when its last token came, in event-loop time.
    `has_tokens`: whether the client has tokens already. `recomputed`: tokens that the next worker has to compute again.
    `is_exact`: see MigrationMetrics.
    """

    request_id: str
    model: str
    reason: Reason
    away_from: str | None
    since: float
    has_tokens: bool
    recomputed: int
    is_exact: bool = True

    def fail(self, metrics: MigrationMetrics, outcome: str) -> None:
        """Report that no token came after the move. `outcome`: "failure" or "cancelled"."""
        seconds = clock() - self.since
        metrics.observe_move(self.model, has_tokens=self.has_tokens, outcome=outcome, seconds=seconds)

    def succeed(self, metrics: MigrationMetrics, to: str | None, position: int) -> None:
        """Report that the next token has come. `to`: the key of its session. `position`: of that token."""
        seconds = clock() - self.since
        metrics.observe_move(self.model, has_tokens=self.has_tokens, outcome="success", seconds=seconds)
        metrics.count_move(self.model, has_tokens=self.has_tokens, recomputed=self.recomputed, is_exact=self.is_exact)
        log.log(
            logging.INFO if self.reason is Reason.DRAINING else logging.WARNING,
            "request moved",
            request_id=self.request_id,
            away_from=self.away_from,
            to=to,
            reason=self.reason,
            position=position,
            is_exact=self.is_exact,
            gap_ms=round(seconds * 1e3, 1),
        )
