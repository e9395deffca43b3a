"""One request's way from worker to worker.

| event | one leg | a second leg is being made ready |
| --- | --- | --- |
| the current leg delivers | to the client | to the client |
| the second leg delivers | – | in time: it becomes the current one, the first is cut; too late: it starts again |
| the current worker says that it leaves | a second leg starts | – |
| the second's worker says that it leaves | – | a third starts as soon as the second is the current one |
| the current leg fails | the next leg starts, if it may | the second becomes the current one, if it has a worker |
| the second leg fails | – | another starts in its place, if that may help; the first goes on for as long as it can |
| the current leg finishes | the request has finished | the request has finished |

A leg is one attempt on one worker. The first, and one that starts because the one before it has failed, runs in the
request's own task; a second leg has one of its own. Tokens of a leg that is neither reach nobody.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from services.core.call import Call
from services.core.errors import Failure, Reason
from services.core.interface import Delta, Finish, Layer
from services.core.request import FinishReason, Request
from services.frontend.migration.attempt import MigrationAttempt
from services.frontend.migration.history import AttemptHistory
from services.frontend.migration.move import MigrationMetrics, Move
from services.frontend.migration.policy import Policy, policy_for
from services.frontend.migration.recorder import Recorder
from services.runtime.cancel_scope import CancelScope
from services.runtime.loop import clock
from services.runtime.tasks import TaskSet

LAG_TOKENS_MAX = 1
"""How far behind the client a second leg may be when it takes over: each token costs the client one step."""
ROUNDS_MAX = 4
"""How often a second leg starts anew, for it is too far behind or has failed, before it takes over or is given up."""


@dataclass(frozen=True, slots=True)
class MigrationContext:
    """What all journeys share. limit: moves of each, unless its worker or its client allows fewer."""

    limit: int
    replacement_wait_s: float
    metrics: MigrationMetrics
    loop: asyncio.AbstractEventLoop


class Migration:
    """See the module. `run` once."""

    __slots__ = (
        "_call",
        "_context",
        "_current",
        "_delivered_at",
        "_history",
        "_inner",
        "_is_over",
        "_move",
        "_record",
        "_request",
        "_second",
        "_tasks",
    )

    def __init__(self, inner: Layer, request: Request, call: Call, record: Recorder, context: MigrationContext) -> None:
        self._inner = inner
        self._request = request
        self._call = call
        self._record = record
        self._context = context
        self._current = MigrationAttempt(self, ROUNDS_MAX)
        self._tasks: TaskSet | None = None  # The tasks of second legs; None: there was none.
        self._is_over = False
        self._history: AttemptHistory | None = None  # None: there was none.
        self._second: MigrationAttempt | None = None
        self._delivered_at = 0.0  # Of the last token, while there is a second leg.
        self._move: Move | None = None

    async def run(self) -> Finish:
        """To the request's end. Raises Failure."""
        outcome = "failure"
        try:
            try:
                finish = await self._travel()
            finally:
                self._is_over = True
                if self._tasks is not None:
                    await self._tasks.end()
            outcome = "success"
            return finish
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            self._end_move(outcome)
            self._second = self._tasks = None
            del self._current  # It knows the journey, and circles are left to the garbage collector.

    async def _travel(self) -> Finish:
        while True:
            leg = self._current
            if not leg.has_own_task:
                with CancelScope(self._context.loop) as scope:
                    leg.cancel = scope.cancel  # Then another is the current one, or there is a bug beside.
                    await self._run(leg, self._request.after(self._record.token_ids), self._call)
            else:
                assert self._tasks is not None, "it has a task"
                await self._tasks.wait_ended()
            if self._tasks is not None and self._tasks.bug is not None:
                raise self._tasks.bug
            outcome = self._current.outcome
            if isinstance(outcome, Finish):
                return outcome
            if isinstance(outcome, Failure):
                if self._record.position >= self._request.max_tokens:
                    return Finish(FinishReason.LENGTH)  # All that was asked has been delivered.
                self._go_on(outcome)

    # Legs

    async def _run(self, leg: MigrationAttempt, request: Request, call: Call) -> None:
        try:
            leg.outcome = await self._inner(request, replace(call, attempt=leg), leg)
        except Failure as failure:
            leg.outcome = failure

    def _start_second(self, call: Call, rounds_left: int = ROUNDS_MAX) -> None:
        self._second = leg = MigrationAttempt(self, rounds_left, has_own_task=True)
        request = self._request.after(self._record.token_ids)
        if self._tasks is None:
            self._tasks = TaskSet(on_bug=lambda: self._current.cancel())
        leg.cancel = self._tasks.start(self._run_second(leg, request, call))

    async def _run_second(self, leg: MigrationAttempt, request: Request, call: Call) -> None:
        await self._run(leg, request, call)
        if leg is self._second and not self._is_over:
            self._on_second_ended(leg)

    def on_tokens(self, leg: MigrationAttempt, delta: Delta) -> None:
        """A leg's worker has delivered."""
        if self._is_over:
            return  # Its legs are cut, but a message can come before they notice.
        if leg is self._current and self._second is None and delta.position == self._record.position:
            self._record.deliver(delta)  # What every token costs that comes while nothing moves.
            return
        takes_over = leg is self._second
        if takes_over and not self._take_over(leg, delta.position):
            return
        if leg is not self._current:
            return
        known = self._record.position - delta.position
        assert known >= 0, f"position {delta.position} where {self._record.position} was due"
        if known < len(delta.token_ids):
            self._record.deliver(_after(delta, known) if known else delta)
            if self._second is not None:
                self._delivered_at = clock()
        if takes_over and leg.leaves_at is not None:
            self._plan(leg)

    def _make_current(self, leg: MigrationAttempt) -> None:
        self._current, self._second = leg, None
        self._lost().begin_leg()

    def _lost(self) -> AttemptHistory:
        """So far."""
        if self._history is None:
            self._history = AttemptHistory(self._record)
        return self._history

    def on_begun(self) -> None:
        """From now on it goes its own way: it has begun, or lost its worker. The other choices need not wait for it."""
        if (choice_group := self._call.choice_group) is not None:
            self._call = replace(self._call, choice_group=None)
            choice_group.leave(self._request.choice)

    # Unplanned moves

    def _go_on(self, failure: Failure) -> None:
        """The current leg is lost: let the second take its place, or start the next. Raises what the client gets."""
        history, policy = self._lost(), self._policy()
        history.count_death(failure, has_begun=self._current.has_begun)
        progress = history.progress()
        if policy.is_poison(progress):
            detail = f"two workers died of this request, one after the other: {failure.detail}"
            raise Failure(Reason.POISON_REQUEST, detail) from failure
        if not policy.may_migrate(failure, progress):
            raise history.last_word(failure) from failure
        history.count(failure, is_timed=self._call.replacement_deadline is not None)
        self._call = self._next_call(failure)
        if not failure.traits.free or (failure.reason is Reason.DRAINING and self._record.count):
            self._begin_move(failure.reason, clock())
        second = self._second
        if second is not None and second.worker is None:
            second.cancel()  # It waits for a worker still, and not as long as a lost request may.
            second = None
        self._make_current(MigrationAttempt(self, ROUNDS_MAX) if second is None else second)
        if self._current.leaves_at is not None:
            self._plan(self._current)

    def _policy(self) -> Policy:
        """Most requests never ask for it."""
        assert self._call.card is not None, "preprocess names the card"
        return policy_for(self._request, self._call, self._call.card, self._context.limit)

    def _next_call(self, failure: Failure) -> Call:
        worker = self._current.worker
        if failure.reason is not Reason.WORKER_AT_CAPACITY:
            self.on_begun()
        elif self._call.choice_group is not None and worker is not None:
            self._call.choice_group.renew(worker)  # All of its choices were refused, and go on together.
        call = self._call
        excluded = call.excluded if worker is None else call.excluded | {worker}
        was_waiting = self._current.leaves_at is not None  # For a slot, since before its worker said that it leaves.
        was_taken = self._record.count > 0 or was_waiting or call.replacement_deadline is not None
        if failure.reason is Reason.ENGINE_ERROR or (failure.traits.free and not was_taken):
            return replace(call, excluded=excluded)  # It has lost nothing that would be worth a wait.
        if failure.reason is Reason.WORKER_AT_CAPACITY:  # It may have a slot later.
            excluded = call.excluded
        until = call.replacement_deadline if failure.traits.free else None  # A refusal does not prolong the wait.
        if until is None:
            until = clock() + self._context.replacement_wait_s
        return replace(call, excluded=excluded, replacement_deadline=until)

    # Planned moves

    def on_leaving(self, leg: MigrationAttempt, grace_s: float) -> None:
        """The worker of a leg leaves in `grace_s`: make another ready meanwhile."""
        leg.leaves_at = clock() + grace_s
        if leg is self._current and self._second is None:
            self._plan(leg)

    def _plan(self, leg: MigrationAttempt) -> None:
        """Start a second leg beside the current one, if it may ever take over."""
        policy = self._policy()
        may = policy.limit > 0 and policy.may_leave(self._lost().progress())
        if may and leg.outcome is None and not self._is_over:
            self.on_begun()
            self._delivered_at = clock()
            self._start_second(self._planned_call())

    def _planned_call(self, *refused: str | None) -> Call:
        """Anywhere but where the request is, and where it was refused."""
        away = {worker for worker in (self._current.worker, *refused) if worker is not None}
        return replace(self._call, excluded=self._call.excluded | away, replacement_deadline=self._current.leaves_at)

    def _take_over(self, leg: MigrationAttempt, position: int) -> bool:
        """Make the second leg the current one, unless the first has finished, must not be left, or is too far ahead."""
        if isinstance(self._current.outcome, Finish):
            return False
        if not self._policy().may_leave(self._lost().progress()):
            leg.cancel()
            self._second = None
            return False
        if self._record.position - position > LAG_TOKENS_MAX and leg.rounds_left > 0:
            leg.cancel()
            self._start_second(self._planned_call(), leg.rounds_left - 1)
            return False
        self._begin_move(Reason.DRAINING, self._delivered_at)
        self._call = replace(self._planned_call(), replacement_deadline=None)
        self._current.cancel()
        self._make_current(leg)
        return True

    def _on_second_ended(self, leg: MigrationAttempt) -> None:
        """Without a token: there was nothing left to say, or it failed, and another may do better."""
        if isinstance(leg.outcome, Finish):
            if not self._take_over(leg, self._record.position):
                self._second = None
            return
        assert leg.outcome is not None, "it has ended"
        self._second = None
        if leg.outcome.traits.migrates and leg.rounds_left > 0:
            self._start_second(self._planned_call(leg.worker), leg.rounds_left - 1)

    # What is told of moves

    def _begin_move(self, reason: Reason, since: float) -> None:
        self._end_move("failure")
        record, request, call = self._record, self._request, self._call
        recomputed, has_tokens = len(request.prompt_token_ids) + record.position, record.count > 0
        away_from = self._current.worker
        self._move = Move(call.request_id, request.model, reason, away_from, since, has_tokens, recomputed)
        record.on_next(lambda: self._end_move("success"))

    def _end_move(self, outcome: str) -> None:
        """The move under way, if one is, has led somewhere, or not."""
        if self._move is None:
            return
        move, self._move = self._move, None
        self._record.on_next(None)
        if outcome != "success":
            move.fail(self._context.metrics, outcome)
            return
        self._call = replace(self._call, replacement_deadline=None)
        move.succeed(self._context.metrics, self._current.worker, self._record.position)


def _after(delta: Delta, known: int) -> Delta:
    """The delta without its first `known` tokens."""
    token_ids: Sequence[int] = delta.token_ids[known:]
    logprobs = None if delta.logprobs is None else delta.logprobs[known:]
    return Delta(delta.position + known, token_ids, choice=delta.choice, logprobs=logprobs)
