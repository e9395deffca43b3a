"""Whether a request may move to another worker: pure policy, from values to a value."""

from dataclasses import dataclass

from services.core.call import Call
from services.core.errors import Failure, Reason
from services.core.model_card import ModelCard
from services.core.request import Request

FREE_MOVES_MAX = 64
"""Refusals are free, but not for ever."""
BARREN_DEATHS_MAX = 2
DEATHS = (Reason.DISCONNECTED, Reason.ENGINE_DEAD)
"""How a worker ends that a request kills."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a request has come: moves that count, moves that were free, tokens delivered, whether they are known.

    barren_deaths: workers in a row that died before they gave it a token.
    """

    moves: int
    free_moves: int
    delivered: int
    is_tracked: bool
    barren_deaths: int = 0


@dataclass(frozen=True, slots=True)
class Policy:
    """What is allowed to one request. Pure: `Journey` is the mechanism."""

    limit: int
    can_resume: bool

    def may_migrate(self, failure: Failure, progress: Progress) -> bool:
        """Whether the request may go on elsewhere after this failure."""
        if not self.may_leave(progress):
            return False
        if failure.reason is Reason.ENGINE_ERROR:  # It may be the request's own fault: once, and only from the start.
            return self.limit > 0 and progress.moves == 0 and not progress.delivered
        if not failure.traits.migrates:
            return False
        if failure.traits.free:
            return progress.free_moves < FREE_MOVES_MAX and (self.limit > 0 or not progress.delivered)
        return progress.moves < self.limit

    def may_leave(self, progress: Progress) -> bool:
        """Whether another worker could carry the request on at all: a request without tokens can start anywhere."""
        return not progress.delivered or (progress.is_tracked and self.can_resume)

    def is_poison(self, progress: Progress) -> bool:
        """Whether workers die of the request, as far as can be told from here."""
        return progress.barren_deaths >= BARREN_DEATHS_MAX


def policy_for(request: Request, call: Call, card: ModelCard, limit: int) -> Policy:
    """The lowest limit of frontend, worker and client counts; an answer that an engine cannot resume exactly stays."""
    allowed = allowed_by(card, limit)
    resume = card.resume
    return Policy(
        limit=allowed if call.migration_limit is None else min(allowed, call.migration_limit),
        can_resume=(resume.sampling or request.sampling.is_greedy)
        and (resume.penalties or not request.sampling.has_penalties)
        and (resume.guided or request.guided is None)
        and (resume.logprobs or request.logprobs is None),
    )


def allowed_by(card: ModelCard, limit: int) -> int:
    """The frontend's limit, lowered by the worker's."""
    return limit if card.migration_limit is None else min(limit, card.migration_limit)
