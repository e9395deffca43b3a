"""One request on its way from worker to worker.

| event | one attempt | a second attempt is prepared |
| --- | --- | --- |
| the current attempt delivers | its tokens go to the client | its tokens go to the client |
| the second attempt delivers | – | close behind: it replaces the current one; far behind: another starts in its place |
| the worker of the current attempt leaves | a second attempt starts | no other attempt starts |
| the worker of the second attempt leaves | – | a third attempt starts once the second is the current one |
| the current attempt fails | the next attempt starts, if it may | the second replaces it, if it has a worker |
| the second attempt fails | – | another starts in its place, if it may; the current one goes on |
| the current attempt finishes | the request finishes | the request finishes |

The first attempt, and an attempt that starts because the one before it has failed, run in the request's own task. A
second attempt has its own task. When it becomes the current one, the attempt before it is cancelled: an attempt that
is neither the current nor the second one delivers nothing to the client.

`policy.py` decides what may happen; this module makes it happen.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from services.core.call import Call, RoutedSession
from services.core.errors import Failure, Reason
from services.core.interface import Delta, Finish, Layer
from services.core.request import Continuation, FinishReason, Request
from services.frontend.migration.attempt import MigrationAttempt
from services.frontend.migration.history import AttemptHistory
from services.frontend.migration.move import MigrationMetrics, Move
from services.frontend.migration.policy import (
    ROUNDS_MAX,
    Policy,
    ResumeSampling,
    Verdict,
    is_move,
    judge_second,
    may_replace_second,
    next_placement,
    policy_for,
)
from services.frontend.migration.recorder import Recorder
from services.runtime.cancel_scope import CancelScope
from services.runtime.loop import clock
from services.runtime.tasks import TaskSet


@dataclass(frozen=True, slots=True)
class MigrationContext:
    """What all migrations share.

    `limit`: moves of each request, unless its worker or its client allows fewer. `resume_sampling`: see the policy.
    """

    inner: Layer
    limit: int
    resume_sampling: ResumeSampling
    replacement_wait_s: float
    metrics: MigrationMetrics
    loop: asyncio.AbstractEventLoop

    def policy(self, request: Request, call: Call, session: RoutedSession | None) -> Policy:
        """The policy of a request on the worker of `session`."""
        assert call.card is not None, "Preprocess sets the card"
        worker_limit = None if session is None else session.migration_limit
        return policy_for(request, call, call.card, self.limit, worker_limit, self.resume_sampling)


def _with_logprobs(call: Call, request: Request, record: Recorder) -> Call:
    """The call, with the log probabilities of the tokens that the request brings beside those of the client."""
    kept = call.kept
    if kept is None or not record.logprobs:
        return call
    count = len(request.generated_token_ids) - kept.base  # More may have come since the request was made.
    return replace(call, kept=replace(kept, prior_logprobs=tuple(record.logprobs[:count])))


class Migration:
    """Runs the attempts of one request: see the module's table. `run` is called once."""

    __slots__ = (
        "_call",
        "_context",
        "_current",
        "_delivered_at",
        "_history",
        "_is_over",
        "_move",
        "_record",
        "_request",
        "_second",
        "_tasks",
    )

    def __init__(self, request: Request, call: Call, record: Recorder, context: MigrationContext) -> None:
        self._request = request
        self._call = call
        self._record = record
        self._context = context
        self._current = MigrationAttempt(self, ROUNDS_MAX)
        self._second: MigrationAttempt | None = None
        self._tasks: TaskSet | None = None  # Tasks of second attempts, created with the first of them.
        self._history: AttemptHistory | None = None  # Created by `_get_history`.
        self._move: Move | None = None  # Reported when the next token comes, or when there is none.
        self._delivered_at = 0.0  # When the last token came; kept only while there is a second attempt.
        self._is_over = False

    async def run(self) -> Finish:
        """Run the request to its end. Raises Failure."""
        outcome = "failure"
        try:
            try:
                finish = await self._run_attempts()
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
            del self._current  # It refers to the migration, and a cycle would wait for the garbage collector.

    async def _run_attempts(self) -> Finish:
        while True:
            attempt = self._current
            if not attempt.has_own_task:
                with CancelScope(self._context.loop) as scope:
                    attempt.cancel = scope.cancel  # Called when a second attempt takes over, or has a bug.
                    await self._run(attempt, self._request.after(self._record.token_ids), self._call)
            else:
                assert self._tasks is not None, "an attempt with a task of its own is in the task set"
                await self._tasks.wait_ended()
            if self._tasks is not None and self._tasks.bug is not None:
                raise self._tasks.bug
            outcome = self._current.outcome
            if isinstance(outcome, Finish):
                return outcome
            if isinstance(outcome, Failure):
                if self._record.position >= self._request.max_tokens:
                    return Finish(FinishReason.LENGTH)  # The answer is complete, only its finish was lost.
                self._move_on(outcome)

    async def _run(self, attempt: MigrationAttempt, request: Request, call: Call) -> None:
        await attempt.run(self._context.inner, request, _with_logprobs(call, request, self._record))

    def _policy(self) -> Policy:
        """The request's policy on its current worker, computed when that fails or leaves: most never need it."""
        return self._context.policy(self._request, self._call, self._current.session)

    def _get_history(self) -> AttemptHistory:
        self._history = self._history or AttemptHistory(self._record)
        return self._history

    def _make_current(self, attempt: MigrationAttempt) -> None:
        self._current, self._second = attempt, None
        self._get_history().begin_attempt()

    # Events of an attempt

    def is_current(self, attempt: MigrationAttempt) -> bool:
        return attempt is self._current

    def on_begun(self) -> None:
        """The engine of an attempt has begun: the choice moves alone from now on."""
        self.leave_group()
        if self._call.kept is not None:
            self._call.kept.generation.begin()

    def leave_group(self) -> None:
        """Take the choice out of its group: it has begun or lost its worker, and moves alone from now on."""
        if (choice_group := self._call.choice_group) is not None:
            self._call = replace(self._call, choice_group=None)
            choice_group.leave(self._request.choice)

    def on_tokens(self, attempt: MigrationAttempt, delta: Delta) -> None:
        """The worker of an attempt has delivered tokens."""
        if self._is_over:
            return  # The attempts are cancelled, but a message can come before they end.
        if attempt is self._current and self._second is None and delta.position == self._record.position:
            self._record.deliver(delta)  # The path of every token while nothing moves.
            return
        takes_over = attempt is self._second
        if takes_over and not self._try_take_over(attempt, delta.position):
            return
        if attempt is not self._current:
            return
        known = self._record.position - delta.position
        assert known >= 0, f"tokens start at position {delta.position}, expected {self._record.position}"
        if known < len(delta.token_ids):
            self._record.deliver(_skip(delta, known) if known else delta)
            if self._second is not None:
                self._delivered_at = clock()
        if takes_over and attempt.leaves_at is not None:
            self._prepare_second(attempt)

    def on_leaving(self, attempt: MigrationAttempt, grace_s: float) -> None:
        """The worker of an attempt leaves in `grace_s` seconds: start a second attempt meanwhile."""
        attempt.leaves_at = clock() + grace_s
        if not self._is_over and attempt is self._current and self._second is None:
            self._prepare_second(attempt)

    # Moves after a failure

    def _move_on(self, failure: Failure) -> None:
        """The current attempt has failed: make the second one current, or start another. Raises Failure to give up."""
        history, policy = self._get_history(), self._policy()
        history.count_death(failure, has_begun=self._current.has_begun)
        progress = history.progress()
        if policy.is_poison(progress):
            why = f"two workers died while they ran this request, one after the other: {failure.detail}"
            raise Failure(Reason.POISON_REQUEST, why) from failure
        if not policy.may_migrate(failure, progress):
            raise history.final_failure(failure) from failure
        history.count(failure, is_timed=self._call.replacement_deadline is not None)
        was_queued = self._current.leaves_at is not None  # Accepted before its worker announced that it leaves.
        was_accepted = self._record.count > 0 or was_queued or self._call.replacement_deadline is not None
        self._update_group(failure, may_wait=was_accepted)
        placement = next_placement(failure, was_accepted=was_accepted)
        self._call = placement.apply(self._call, self._current.worker, clock() + self._context.replacement_wait_s)
        if is_move(failure, self._record.count):
            self._begin_move(failure.reason, clock())
        if progress.delivered and not policy.is_exact:
            self._record.tell(Continuation.PREFIX)
        second = self._second
        if second is not None and (second.worker is None or not policy.may_join(progress)):
            second.cancel()  # It waits for a worker, with a shorter deadline than the next attempt gets, or drew anew.
            second = None
        self._make_current(MigrationAttempt(self, ROUNDS_MAX) if second is None else second)
        if self._current.leaves_at is not None:
            self._prepare_second(self._current)

    def _update_group(self, failure: Failure, *, may_wait: bool) -> None:
        """A refusal concerns all choices of a group, which go on together; a loss or a wait is this choice's alone."""
        worker, choice_group = self._current.worker, self._call.choice_group
        if failure.reason is not Reason.WORKER_AT_CAPACITY or may_wait:
            self.leave_group()
        elif choice_group is not None and worker is not None:
            choice_group.renew(worker)

    # Planned moves: a second attempt is prepared before the worker is gone

    def _prepare_second(self, attempt: MigrationAttempt) -> None:
        """Start a second attempt beside the current one, if it may ever take over."""
        may_prepare = self._policy().may_prepare(self._get_history().progress())
        if may_prepare and attempt.outcome is None:
            self.leave_group()
            self._delivered_at = clock()
            self._start_second(self._call_beside(), ROUNDS_MAX)

    def _call_beside(self, *refused: str | None) -> Call:
        """The call of a second attempt: to any worker but the current one and those in `refused`."""
        away = {worker for worker in (self._current.worker, *refused) if worker is not None}
        return replace(self._call, excluded=self._call.excluded | away, replacement_deadline=self._current.leaves_at)

    def _start_second(self, call: Call, rounds_left: int) -> None:
        self._second = attempt = MigrationAttempt(self, rounds_left, has_own_task=True)
        request = self._request.after(self._record.token_ids)
        if self._tasks is None:
            self._tasks = TaskSet(on_bug=lambda: self._current.cancel())
        attempt.cancel = self._tasks.start(self._run_second(attempt, request, call))

    async def _run_second(self, attempt: MigrationAttempt, request: Request, call: Call) -> None:
        await self._run(attempt, request, call)
        if attempt is self._second and not self._is_over:
            self._on_second_ended(attempt)

    def _on_second_ended(self, attempt: MigrationAttempt) -> None:
        """The second attempt has ended without a token: it failed, or the answer was complete already."""
        outcome = attempt.outcome
        if isinstance(outcome, Finish):
            if not self._try_take_over(attempt, self._record.position):
                self._second = None
            return
        assert outcome is not None, "an attempt that has ended has an outcome"
        self._second = None
        if may_replace_second(outcome, attempt.rounds_left):
            self._start_second(self._call_beside(attempt.worker), attempt.rounds_left - 1)

    def _try_take_over(self, attempt: MigrationAttempt, position: int) -> bool:
        """Make the second attempt the current one, unless policy decides otherwise. Returns whether it is."""
        verdict = judge_second(
            has_first_finished=isinstance(self._current.outcome, Finish),
            may_join=self._policy().may_join(self._get_history().progress()),
            lag=self._record.position - position,
            rounds_left=attempt.rounds_left,
        )
        if verdict in (Verdict.GIVE_UP, Verdict.START_AGAIN):
            attempt.cancel()
            self._second = None
        if verdict is Verdict.START_AGAIN:
            self._start_second(self._call_beside(), attempt.rounds_left - 1)
        if verdict is not Verdict.TAKE_OVER:
            return False
        self._begin_move(Reason.DRAINING, self._delivered_at)
        self._call = replace(self._call_beside(), replacement_deadline=None)
        self._current.cancel()
        self._make_current(attempt)
        return True

    # Reports of moves

    def _begin_move(self, reason: Reason, since: float) -> None:
        self._end_move("failure")
        record, request, call, has_tokens = self._record, self._request, self._call, self._record.count > 0
        recomputed = len(request.prompt_token_ids) + record.position
        is_exact, away_from = self._policy().is_exact or not has_tokens, self._current.worker
        self._move = Move(call.request_id, request.model, reason, away_from, since, has_tokens, recomputed, is_exact)
        record.on_next(lambda: self._end_move("success"))

    def _end_move(self, outcome: str) -> None:
        """Report the current move, if there is one. `outcome`: "success", "failure" or "cancelled"."""
        move, self._move = self._move, None
        if move is None:
            return
        self._record.on_next(None)
        if outcome == "success":
            self._call = replace(self._call, replacement_deadline=None)
            move.succeed(self._context.metrics, self._current.worker, self._record.position)
        else:
            move.fail(self._context.metrics, outcome)


def _skip(delta: Delta, known: int) -> Delta:
    """The delta without its first `known` tokens."""
    token_ids: Sequence[int] = delta.token_ids[known:]
    logprobs = None if delta.logprobs is None else delta.logprobs[known:]
    return Delta(delta.position + known, token_ids, choice=delta.choice, logprobs=logprobs)
