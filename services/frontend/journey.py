"""One request's way from worker to worker.

| event | one leg | a second leg is being made ready |
| --- | --- | --- |
| the current leg delivers | to the client | to the client |
| the second leg delivers | – | in time: it becomes the current one, the first is cut; too late: it starts again |
| the current worker says that it leaves | a second leg starts | – |
| the current leg fails | the next leg starts, if it may | the second becomes the current one |
| the second leg fails | – | it is dropped; the first goes on for as long as it can |
| the current leg finishes | the request has finished | the request has finished |

A leg is one attempt on one worker, in a task of its own. Tokens of a leg that is neither reach nobody.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import structlog

from services.errors import Failure, Reason
from services.frontend.policy import DEATHS, Policy, Progress
from services.frontend.record import Recorder
from services.layers import root_cause
from services.request import Attempt, Call, Delta, Finish, FinishReason, Layer, Request

log = structlog.get_logger()

LAG_TOKENS_MAX = 1
"""How far behind the current leg a second one may be when it takes over: each token costs the client one step."""
ROUNDS_MAX = 4
"""How often a second leg starts anew because it is too far behind, before it takes over all the same."""


class MigrationMetrics(Protocol):
    """What is counted about moves; `has_tokens` tells an ongoing request from a new one."""

    def count_move(self, model: str, *, has_tokens: bool, recomputed: int) -> None: ...

    def observe_move(self, model: str, *, has_tokens: bool, outcome: str, seconds: float) -> None: ...

    def count_exceeded(self, model: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Terms:
    """What a journey may do, and whom it tells."""

    policy: Policy
    replacement_wait_s: float
    metrics: MigrationMetrics


class Leg:
    """One attempt. It is the sink of its worker's tokens, and passes them to the journey."""

    __slots__ = ("_journey", "attempt", "outcome", "rounds_left", "task")

    def __init__(self, journey: "Journey", rounds_left: int) -> None:
        self._journey = journey
        self.attempt = Attempt(on_leaving=lambda grace_s: journey.on_leaving(self, grace_s))
        self.outcome: Finish | Failure | None = None
        self.rounds_left = rounds_left
        self.task: asyncio.Task[None] | None = None

    def deliver(self, delta: Delta) -> None:
        self._journey.on_tokens(self, delta)

    def cut(self) -> None:
        """Nothing of it is wanted any more."""
        if self.task is not None:
            self.task.cancel()


class Journey:
    """See the module. `run` once."""

    def __init__(self, inner: Layer, request: Request, call: Call, record: Recorder, terms: Terms) -> None:
        self._inner = inner
        self._request = request
        self._call = call
        self._record = record
        self._terms = terms
        self._clock = asyncio.get_running_loop().time
        self._has_outcome = asyncio.Event()
        self._moves = self._free_moves = 0
        self._barren_deaths = 0
        self._given_before = 0  # Tokens that the client had when the current leg became the current one.
        self._cause: Failure | None = None
        self._refusal: Failure | None = None
        self._second: Leg | None = None
        self._lost_at: float | None = None

    async def run(self) -> Finish:
        """To the request's end. Raises Failure."""
        try:
            async with asyncio.TaskGroup() as self._group:
                self._current = self._start(self._call)
                try:
                    return await self._travel()
                finally:
                    self._drop_second()
        except ExceptionGroup as failures:
            raise root_cause(failures) from None
        finally:
            self._end_move("cancelled" if asyncio.current_task().cancelling() else "failure")  # type: ignore[union-attr]

    async def _travel(self) -> Finish:
        while True:
            await self._has_outcome.wait()
            self._has_outcome.clear()
            outcome = self._current.outcome
            if isinstance(outcome, Finish):
                return outcome
            if isinstance(outcome, Failure):
                if self._record.position >= self._request.max_tokens:
                    return Finish(FinishReason.LENGTH)  # All that was asked has been delivered.
                self._go_on(outcome)

    # Legs

    def _start(self, call: Call, rounds_left: int = ROUNDS_MAX) -> Leg:
        leg = Leg(self, rounds_left)
        request = self._request.after(self._record.token_ids)
        leg.task = self._group.create_task(self._run(leg, request, replace(call, attempt=leg.attempt)))
        return leg

    async def _run(self, leg: Leg, request: Request, call: Call) -> None:
        try:
            leg.outcome = await self._inner(request, call, leg)
        except Failure as failure:
            leg.outcome = failure
        if leg is self._second:
            self._on_second_ended(leg)
        self._has_outcome.set()

    def on_tokens(self, leg: Leg, delta: Delta) -> None:
        """A leg's worker has delivered."""
        if leg is self._second and not self._take_over(leg, delta.position):
            return
        if leg is self._current:
            known = self._record.position - delta.position
            if known < len(delta.token_ids) or not delta.token_ids:
                self._record.deliver(_after(delta, known) if known else delta)

    # Unplanned moves

    def _go_on(self, failure: Failure) -> None:
        """The current leg is lost: let the second take its place, or start the next. Raises what the client gets."""
        self._count_death(failure)
        progress = self._progress()
        if self._terms.policy.is_poison(progress):
            detail = f"two workers died of this request, one after the other: {failure.detail}"
            raise Failure(Reason.POISON_REQUEST, detail) from failure
        if not self._terms.policy.may_migrate(failure, progress):
            raise self._last_word(failure) from failure
        self._count(failure)
        self._call = self._next_call(failure)
        if not failure.traits.free or (failure.reason is Reason.DRAINING and self._record.count):
            self._begin_move(failure.reason)
        if self._second is not None:
            self._current, self._second = self._second, None
        else:
            self._current = self._start(self._call)
        self._given_before = self._record.count

    def _count_death(self, failure: Failure) -> None:
        if self._record.count > self._given_before:
            self._barren_deaths = 0
        elif failure.reason in DEATHS:
            self._barren_deaths += 1

    def _last_word(self, failure: Failure) -> Failure:
        """What cost the request its worker, and what became of the last try to go on."""
        cause = self._cause
        if cause is None:
            is_refused_by_all = failure.reason is Reason.NO_WORKERS  # Whichever has room again has refused it before.
            return self._refusal if is_refused_by_all and self._refusal is not None else failure
        return Failure(cause.reason, f"{cause.detail}; and then: {failure.detail}", retry_after_s=failure.retry_after_s)

    def _progress(self) -> Progress:
        record = self._record
        return Progress(self._moves, self._free_moves, record.count, record.is_tracking, self._barren_deaths)

    def _count(self, failure: Failure) -> None:
        if failure.traits.free:
            self._free_moves += 1
            self._refusal = failure if failure.reason is Reason.WORKER_AT_CAPACITY else self._refusal
            return
        self._moves += 1
        self._cause = self._cause or failure

    def _next_call(self, failure: Failure) -> Call:
        call, worker = self._call, self._current.attempt.worker
        excluded = call.excluded if worker is None else call.excluded | {worker}
        has_begun = self._record.count > 0 or call.replacement_deadline is not None
        if failure.reason is Reason.ENGINE_ERROR or (failure.traits.free and not has_begun):
            return replace(call, excluded=excluded)  # It has lost nothing that would be worth a wait.
        if failure.reason is Reason.WORKER_AT_CAPACITY:  # It may have a slot later.
            excluded = call.excluded
        until = self._clock() + self._terms.replacement_wait_s
        return replace(call, excluded=excluded, replacement_deadline=until)

    # Planned moves

    def on_leaving(self, leg: Leg, grace_s: float) -> None:
        """The worker of a leg leaves in `grace_s`: make another ready meanwhile."""
        is_free_to = leg is self._current and self._second is None and self._terms.policy.limit > 0
        if is_free_to and leg.outcome is None and self._terms.policy.may_leave(self._progress()):
            self._second = self._start(self._planned_call(self._clock() + grace_s))

    def _planned_call(self, until: float) -> Call:
        worker = self._current.attempt.worker
        excluded = self._call.excluded if worker is None else self._call.excluded | {worker}
        return replace(self._call, excluded=excluded, replacement_deadline=until)

    def _take_over(self, leg: Leg, position: int) -> bool:
        """The second leg delivers: let it be the current one, unless it is too far behind to go on without a gap."""
        if self._record.position - position > LAG_TOKENS_MAX and leg.rounds_left > 0:
            leg.cut()
            until = self._clock() + self._terms.replacement_wait_s
            self._second = self._start(self._planned_call(until), leg.rounds_left - 1)
            return False
        self._begin_move(Reason.DRAINING)
        self._call = self._planned_call(self._clock())
        self._current.cut()
        self._current, self._second = leg, None
        self._given_before = self._record.count
        return True

    def _on_second_ended(self, leg: Leg) -> None:
        """Without a token: it failed, or there was nothing left to say."""
        if isinstance(leg.outcome, Finish) and self._take_over(leg, self._record.position):
            return
        self._second = None

    def _drop_second(self) -> None:
        if self._second is not None:
            self._second.cut()
        self._current.cut()

    # What is told of moves

    def _begin_move(self, reason: Reason) -> None:
        self._end_move("failure")
        self._lost_at, record = self._clock(), self._record
        has_tokens, away_from = record.count > 0, self._current.attempt.worker
        recomputed = len(self._request.prompt_token_ids) + record.position
        self._terms.metrics.count_move(self._request.model, has_tokens=has_tokens, recomputed=recomputed)

        def end() -> None:
            gap_s = self._end_move("success")
            level = logging.INFO if reason is Reason.DRAINING else logging.WARNING
            log.log(
                level,
                "request moved",
                request_id=self._call.request_id,
                away_from=away_from,
                to=self._current.attempt.worker,
                reason=reason,
                position=record.position,
                gap_ms=round(gap_s * 1e3, 1),
            )

        record.on_next(end)

    def _end_move(self, outcome: str) -> float:
        """Seconds since the worker was lost, if a move is under way."""
        if self._lost_at is None:
            return 0.0
        seconds, self._lost_at = self._clock() - self._lost_at, None
        self._record.on_next(None)
        has_tokens = self._record.count > 0
        self._terms.metrics.observe_move(self._request.model, has_tokens=has_tokens, outcome=outcome, seconds=seconds)
        return seconds


def _after(delta: Delta, known: int) -> Delta:
    """The delta without its first `known` tokens."""
    token_ids: Sequence[int] = delta.token_ids[known:]
    logprobs = None if delta.logprobs is None else delta.logprobs[known:]
    return Delta(delta.position + known, token_ids, choice=delta.choice, logprobs=logprobs)
