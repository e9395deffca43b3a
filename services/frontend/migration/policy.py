"""The rules of migration as pure functions: values in, a value out. `Migration` is the mechanism."""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal, NamedTuple

from msgspec.structs import replace

from services.core.call import Call
from services.core.errors import Failure, Reason
from services.core.model_card import ModelCard
from services.core.request import Request

ResumeSampling = Literal["exact", "prefix"]
"""Whether sampled answers of an engine that draws without seeds stay on their worker, or continue with other draws."""
FREE_MOVES_MAX = 64
"""Moves after a refusal are free, but bounded."""
BARREN_DEATHS_MAX = 2
"""Workers in a row that die without a token for the request before it counts as poison."""
DEATHS = (Reason.DISCONNECTED, Reason.ENGINE_DEAD)
"""The failures of a worker that a request has killed."""
LAG_TOKENS_MAX = 1
"""How far a second attempt may be behind the client when it takes over: each token costs the client one step."""
ROUNDS_MAX = 4
"""How often a second attempt is replaced, because it is too far behind or has failed, before it takes over anyway or
is given up."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a request has come.

    `moves`: those that count against the limit. `free_moves`: those after a refusal. `delivered`: tokens. `is_tracked`:
    whether the delivered tokens are known. `barren_deaths`: workers in a row that died without a token for the request.
    """

    moves: int
    free_moves: int
    delivered: int
    is_tracked: bool
    barren_deaths: int = 0


@dataclass(frozen=True, slots=True)
class Policy:
    """What one request may do.

    `limit`: moves. `can_resume`: another engine may continue after the tokens so far. `is_exact`: it continues with the
    tokens that would have come without the move.
    """

    limit: int
    can_resume: bool
    is_exact: bool = True

    def may_migrate(self, failure: Failure, progress: Progress) -> bool:
        """Whether the request may go on elsewhere after this failure."""
        if not self.may_resume(progress):
            return False
        if failure.reason is Reason.ENGINE_ERROR:  # Perhaps the request's fault: one retry, and only from the start.
            return self.limit > 0 and progress.moves == 0 and not progress.delivered
        if not failure.traits.migrates:
            return False
        if failure.traits.free:
            return progress.free_moves < FREE_MOVES_MAX and (self.limit > 0 or not progress.delivered)
        return progress.moves < self.limit

    def may_resume(self, progress: Progress) -> bool:
        """Whether another worker could continue the request at all: without tokens, any worker can start it."""
        return not progress.delivered or (progress.is_tracked and self.can_resume)

    def may_join(self, progress: Progress) -> bool:
        """Whether an attempt that ran beside the current one may take its place.

        The tokens that it drew meanwhile must be those that the client has got meanwhile.
        """
        return self.may_resume(progress) and (self.is_exact or not progress.delivered)

    def may_prepare(self, progress: Progress) -> bool:
        """Whether a second attempt starts when the worker announces that it leaves."""
        return self.limit > 0 and self.may_join(progress)

    def is_poison(self, progress: Progress) -> bool:
        """Whether the request seems to kill its workers."""
        return progress.barren_deaths >= BARREN_DEATHS_MAX


def policy_for(
    request: Request,
    call: Call,
    card: ModelCard,
    limit: int,
    worker_limit: int | None,
    resume_sampling: ResumeSampling = "prefix",
) -> Policy:
    """The policy of a request: the lowest limit of frontend, worker and client; how the engine can continue.

    | the engine loses | draws | client's seed | resume_sampling | can resume | is exact | because |
    | --- | --- | --- | --- | --- | --- | --- |
    | penalties, a form or log probabilities | – | – | – | no | – | the rest would not fit the tokens so far |
    | nothing | greedy, or by a seed | – | – | yes | yes | each token follows from those before it |
    | nothing | its own | no | prefix | yes | no | nobody asked for these very tokens |
    | nothing | its own | no | exact | no | – | the operator wants the very tokens, or a failure |
    | nothing | its own | yes | – | no | – | a client that gives a seed wants the very tokens |
    """
    is_exact = card.resume.sampling or request.sampling.is_greedy
    draws_anew = resume_sampling == "prefix" and request.sampling.seed is None
    return Policy(
        limit=lowest(lowest(limit, worker_limit), call.migration_limit),
        can_resume=card.resume.lacking_for(request) is None and (is_exact or draws_anew),
        is_exact=is_exact,
    )


def lowest(limit: int, other: int | None) -> int:
    """The lower one of two limits of moves. None: not limited."""
    return limit if other is None else min(limit, other)


class Wait(Enum):
    """How long the next attempt may wait for a worker.

    AS_BEFORE: as long as the failed attempt, which is not at all if that had no deadline. ONE_PERIOD: until the
    deadline that is set already, or for one period if none is set. NEW_PERIOD: for one period from now.
    """

    AS_BEFORE = auto()
    ONE_PERIOD = auto()
    NEW_PERIOD = auto()


class Placement(NamedTuple):
    """Where the next attempt may go. `excludes_worker`: not to the worker of the failed attempt."""

    excludes_worker: bool
    wait: Wait

    def apply(self, call: Call, worker: str | None, new_deadline: float) -> Call:
        """The call of the next attempt. `worker`: the session of the failed one. `new_deadline`: in one period."""
        excluded, deadline = call.excluded, call.replacement_deadline
        if self.excludes_worker and worker is not None:
            excluded |= {worker}
        if self.wait is Wait.NEW_PERIOD or (self.wait is Wait.ONE_PERIOD and deadline is None):
            deadline = new_deadline
        return replace(call, excluded=excluded, replacement_deadline=deadline)


def next_placement(failure: Failure, *, was_accepted: bool) -> Placement:
    """Where the next attempt may go after a failure, and how long it may wait.

    `was_accepted`: a worker had accepted the request before. It has delivered tokens, it waited in the queue of a
    worker that now leaves, or it lost a worker and waits for another already.

    | failure | was accepted | worker | wait | because |
    | --- | --- | --- | --- | --- |
    | ENGINE_ERROR | – | excluded | AS_BEFORE | the worker lives: nothing is lost that is worth a wait |
    | WORKER_AT_CAPACITY | no | excluded | AS_BEFORE | a new request is refused rather than kept waiting |
    | WORKER_AT_CAPACITY | yes | allowed | ONE_PERIOD | it may have room later; refusals do not prolong the wait |
    | DRAINING | no | excluded | AS_BEFORE | a new request is refused rather than kept waiting |
    | DRAINING | yes | excluded | ONE_PERIOD | the worker takes nothing any more |
    | any other | – | excluded | NEW_PERIOD | the worker is lost, and the request had been accepted |
    """
    if failure.reason is Reason.ENGINE_ERROR or (failure.traits.free and not was_accepted):
        return Placement(excludes_worker=True, wait=Wait.AS_BEFORE)
    wait = Wait.ONE_PERIOD if failure.traits.free else Wait.NEW_PERIOD
    return Placement(failure.reason is not Reason.WORKER_AT_CAPACITY, wait)


def is_move(failure: Failure, delivered: int) -> bool:
    """Whether going on after this failure is reported as a move.

    A refusal is not, and neither is a worker that leaves before it has delivered a token.
    """
    return not failure.traits.free or (failure.reason is Reason.DRAINING and delivered > 0)


class Verdict(Enum):
    """What becomes of a second attempt that delivers its first tokens, or ends well without one."""

    IGNORE = auto()
    GIVE_UP = auto()
    START_AGAIN = auto()
    TAKE_OVER = auto()


def judge_second(*, has_first_finished: bool, may_join: bool, lag: int, rounds_left: int) -> Verdict:
    """Decide whether the second attempt replaces the first.

    `lag`: tokens that the client has and the second attempt has not. `rounds_left`: of ROUNDS_MAX.

    | first has finished | may join | lag | rounds left | verdict | because |
    | --- | --- | --- | --- | --- | --- |
    | yes | – | – | – | IGNORE | the answer is complete |
    | no | no | – | – | GIVE_UP | the first has delivered tokens that the second cannot have drawn |
    | no | yes | > LAG_TOKENS_MAX | > 0 | START_AGAIN | the client would wait while the second catches up |
    | no | yes | > LAG_TOKENS_MAX | 0 | TAKE_OVER | a pause is better than no move |
    | no | yes | ≤ LAG_TOKENS_MAX | – | TAKE_OVER | the client notices nothing |
    """
    if has_first_finished:
        return Verdict.IGNORE
    if not may_join:
        return Verdict.GIVE_UP
    if lag > LAG_TOKENS_MAX and rounds_left > 0:
        return Verdict.START_AGAIN
    return Verdict.TAKE_OVER


def may_replace_second(failure: Failure, rounds_left: int) -> bool:
    """Whether another second attempt starts in the place of one that failed."""
    return failure.traits.migrates and rounds_left > 0
