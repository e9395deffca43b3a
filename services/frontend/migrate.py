"""A lost worker costs the client nothing but time: the request goes on elsewhere after the last token delivered.

A worker that is lost has its requests continued on another (break, then make). A worker that says that it leaves goes on
streaming while another is made ready, and is cut off only when that one delivers (make, then break).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from services.card import ModelCard
from services.errors import Failure, Reason
from services.frontend.journey import Journey, Terms
from services.frontend.record import Recorder
from services.request import Call, Finish, Layer, Request, Sink

FREE_MOVES_MAX = 64
"""Refusals are free, but not for ever."""
DEATHS = (Reason.DISCONNECTED, Reason.ENGINE_DEAD)
"""How a worker ends that a request kills."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrateConfig:
    """limit: moves per request, 0 for none. seq_len_max: prompt and generated tokens above which a request is not
    tracked, and so not moved, any more. replacement_wait_s: how long a request that lost its worker waits for another.
    """

    limit: int = 3
    seq_len_max: int | None = None
    replacement_wait_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a request has come: moves that count, moves that were free, tokens delivered, whether they are known.

    died_at: how many tokens had been delivered when its worker last died of something.
    """

    moves: int
    free_moves: int
    delivered: int
    is_tracked: bool
    died_at: int | None = None


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
            return progress.free_moves < FREE_MOVES_MAX
        return progress.moves < self.limit

    def may_leave(self, progress: Progress) -> bool:
        """Whether another worker could carry the request on at all."""
        return progress.is_tracked and (self.can_resume or not progress.delivered)

    def is_poison(self, failure: Failure, progress: Progress) -> bool:
        """Whether two workers died of the request, one after the other, without a token between."""
        return failure.reason in DEATHS and progress.died_at == progress.delivered


def policy_for(request: Request, call: Call, card: ModelCard, config: MigrateConfig) -> Policy:
    """The lowest limit of frontend, worker and client counts; an answer that an engine cannot resume exactly stays."""
    limits = (config.limit, card.migration_limit, call.migration_limit)
    resume = card.resume
    needs = (
        (resume.sampling, not request.sampling.is_greedy),
        (resume.penalties, request.sampling.has_penalties),
        (resume.guided, request.guided is not None),
        (resume.logprobs, request.logprobs is not None),
    )
    return Policy(
        limit=min(limit for limit in limits if limit is not None),
        can_resume=all(can or not needed for can, needed in needs),
    )


class MigrationMetrics(Protocol):
    """What is counted about moves; `has_tokens` tells an ongoing request from a new one."""

    def count_move(self, model: str, *, has_tokens: bool, recomputed: int) -> None: ...

    def observe_move(self, model: str, *, has_tokens: bool, outcome: str, seconds: float) -> None: ...

    def count_exceeded(self, model: str) -> None: ...


class Migrate:
    """Above route: each attempt may choose anew.

    What the client gets when it gives up is the failure that cost it its worker, not what became of the last try.
    """

    def __init__(
        self,
        inner: Layer,
        config: MigrateConfig,
        card_of: Callable[[str], ModelCard],
        metrics: MigrationMetrics,
    ) -> None:
        """card_of: by model name."""
        self._inner = inner
        self._config = config
        self._card_of = card_of
        self._metrics = metrics

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        policy = policy_for(request, call, self._card_of(request.model), self._config)
        record = Recorder(sink, request, self._config.seq_len_max, lambda: self._metrics.count_exceeded(request.model))
        terms = Terms(policy, self._config.replacement_wait_s, self._metrics)
        return await Journey(self._inner, request, call, record, terms).run()
