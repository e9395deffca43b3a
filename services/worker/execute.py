"""Runs requests on the engine: admission before it, one sink for each request behind it."""

import asyncio
from collections.abc import Sequence
from functools import cached_property, partial
from itertools import count
from typing import Any

import structlog

from services.core.call import Call, Cause, Phase
from services.core.choice_group import Reservation
from services.core.common_layers import bug_failure
from services.core.errors import Failure, Reason, RefusedFor
from services.core.interface import Delta, Finish, Sink, Usage
from services.core.request import Request
from services.worker.counters import Counters
from services.worker.dispatcher import Dispatcher, Limits
from services.worker.engine import Engine, Output

log = structlog.get_logger()

ATTACH = "attach"
"""The `endpoint` of calls that came by a session: without their own signal they are cancelled only with all of it."""


class _Run:
    """One request on its way through the worker: its sink, where its answer stands, and how it ends.

    came_at: in the loop's time. timer: ends its wait, while it waits. was_submitted: the engine may know it.
    """

    __slots__ = (
        "attempt",
        "call",
        "came_at",
        "ended",
        "has_tokens",
        "position",
        "request",
        "sink",
        "timer",
        "was_submitted",
    )

    def __init__(self, request: Request, call: Call, sink: Sink, came_at: float, ended: asyncio.Future[Finish]) -> None:
        self.request = request
        self.call = call
        self.attempt = call.attempt
        self.sink = sink
        self.position = len(request.generated_token_ids)
        self.has_tokens = False
        self.came_at = came_at
        self.timer: asyncio.TimerHandle | None = None
        self.was_submitted = False
        self.ended = ended

    def take(self, output: Output) -> None:
        if self.ended.done():
            return
        if output.token_ids:
            if not self.has_tokens:
                self.has_tokens, self.attempt.phase = True, Phase.RUNNING
            self.sink.deliver(
                Delta(self.position, output.token_ids, choice=self.request.choice, logprobs=output.logprobs)
            )
            self.position += len(output.token_ids)
        if output.failure is not None:
            self.fail(output.failure)
        elif output.finish is not None:
            self.attempt.phase = Phase.ENDED
            self.ended.set_result(Finish(output.finish, Usage(len(self.request.prompt_token_ids), self.position)))

    def fail(self, failure: Failure, cause: Cause | None = None) -> None:
        """End it here. cause: who ends it early; None: it is at its end, and the engine has nothing of it any more."""
        if self.ended.done():
            return
        if cause is None:
            self.attempt.phase = Phase.ENDED
        elif self.call.ending.cause is None:
            self.call.ending.cause = cause
        self.ended.set_exception(failure)

    def cause(self, now: float) -> Cause:
        """Who ended it early."""
        if self.call.ending.cause is not None:
            return self.call.ending.cause
        if _has_passed(self.call.deadline, now):
            return Cause.DEADLINE
        return Cause.SESSION_LOST if self.call.endpoint == ATTACH else Cause.CLIENT_DISCONNECT

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()


class Execute:
    """Innermost in the worker: below it there is only the engine.

    Positions count from the first token of the whole continuation, so a continued request starts behind what it brings.
    The choices of a party are admitted together, by the first of them to come.
    """

    def __init__(self, engine: Engine, limits: Limits) -> None:
        self.limits = limits
        self.counters = Counters()
        self._engine = engine
        self._keys = count(1)
        self._runs: dict[int, _Run] = {}
        self._dispatcher = Dispatcher(limits, self._start, self._now)

    @property
    def running_count(self) -> int:
        return self._dispatcher.running_count

    @property
    def waiting_count(self) -> int:
        return self._dispatcher.waiting_count

    @property
    def service_time_s(self) -> float | None:
        """How long a request holds its slot, on average; None: none has ended so far."""
        return self._dispatcher.service_time_s

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        """To ask for it is a system call before Python 3.12: a tenth of what a request costs, so this asks once."""
        return asyncio.get_running_loop()

    def _now(self) -> float:
        """The loop's time, in seconds."""
        return self._loop.time()

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        now = self._now()
        if _has_passed(call.deadline, now):
            self.counters.cancelled[Cause.DEADLINE, Phase.QUEUED] += 1
            raise _deadline_exceeded()
        key = self._take_place(request, call)
        run = self._runs[key] = _Run(request, call, sink, now, self._loop.create_future())
        try:
            if self._dispatcher.is_running(key):
                self._begin(key, run)
            else:
                run.timer = self._loop.call_later(self.limits.wait_s, self._expire, key)
            return await run.ended
        finally:
            self._leave(key, run)

    def emit(self, outputs: Sequence[Output]) -> None:
        """Take one step's outputs from the engine. A bug in what one request makes of them is that request's alone."""
        for output in outputs:
            run = self._runs.get(output.key)
            if run is None:
                continue
            try:
                run.take(output)
            except Exception as error:
                is_last = output.finish is not None or output.failure is not None
                run.fail(bug_failure(error, run.call.request_id), None if is_last else Cause.INTERNAL)

    def fail_all(self, failure: Failure, cause: Cause | None = None) -> None:
        """End all that runs or waits. cause: who ends it early; None: the engine is gone, and nothing can go on."""
        for run in self._runs.values():
            run.fail(failure.copy(), cause)

    def _take_place(self, request: Request, call: Call) -> int:
        """The request's key in the dispatcher, where it has a slot or a place now. Raises what `admit` raises."""
        try:
            if call.choice_group is None:
                return self._admit(1, request.token_count)[0]
            return call.choice_group.claim(request.choice, partial(self._reserve, request.token_count))
        except Failure as failure:
            self.counters.refused += failure.reason is Reason.WORKER_AT_CAPACITY
            raise

    def _admit(self, count: int, token_count: int) -> Sequence[int]:
        keys = [next(self._keys) for _ in range(count)]
        self._dispatcher.admit(keys, token_count)
        return keys

    def _reserve(self, token_count: int, choices: int) -> Reservation:
        return self._admit(choices, token_count), partial(self._dispatcher.release, was_used=False)

    def _start(self, key: Any) -> None:
        """There is a slot for it. A choice that has not come yet begins when it comes."""
        if (run := self._runs.get(key)) is None:
            return
        run.stop_timer()
        now = self._now()
        if _has_passed(run.call.deadline, now) or _has_passed(run.came_at + self.limits.wait_s, now):
            self._end_waiting(run)  # Its timer is late: all of this turn of the loop comes before it.
        elif not run.ended.done():  # One that was cancelled in this turn has not left yet.
            self._begin(key, run)

    def _begin(self, key: int, run: _Run) -> None:
        self.counters.wait_s.observe(0 if run.timer is None else self._now() - run.came_at)
        run.was_submitted = True
        try:
            self._engine.submit(key, run.request)
            run.attempt.begin()
        except Failure as failure:
            self.counters.refused += failure.reason is Reason.WORKER_AT_CAPACITY
            run.fail(failure)
        except Exception:
            log.exception("the engine refused a request with an exception of its own")
            run.fail(Failure(Reason.ENGINE_ERROR, "the engine failed to start the request"))

    def _expire(self, key: int) -> None:
        """It leaves the queue before its own task takes note: nothing can start it any more."""
        self._dispatcher.release(key)
        self._end_waiting(self._runs[key])

    def _end_waiting(self, run: _Run) -> None:
        """It has waited too long. Its own deadline comes first, as it does for its client."""
        if _has_passed(run.call.deadline, self._now()):
            run.fail(_deadline_exceeded(), Cause.DEADLINE)
        elif not run.ended.done():
            self.counters.queue_timeouts += 1
            detail = f"waited {self.limits.wait_s:g} s for a slot of a worker at capacity"
            run.fail(self._dispatcher.refusal(RefusedFor.QUEUE_TIMEOUT, detail))

    def _leave(self, key: int, run: _Run) -> None:
        del self._runs[key]
        run.stop_timer()
        if run.attempt.phase is not Phase.ENDED:
            self._count_early_end(run)
        try:
            if run.was_submitted:
                self._engine.cancel(key)  # First: whoever gets the slot must not find the engine full.
        finally:
            self._dispatcher.release(key, was_used=run.attempt.has_begun)

    def _count_early_end(self, run: _Run) -> None:
        phase, cause = run.attempt.phase, run.cause(self._now())
        self.counters.aborted += phase is not Phase.QUEUED
        self.counters.queue_deadlines += phase is Phase.QUEUED and cause is Cause.DEADLINE
        if cause is not Cause.SIGNAL:  # That one is counted where it comes in: it may come after the end as well.
            self.counters.cancelled[cause, phase] += 1


def _has_passed(deadline: float | None, now: float) -> bool:
    return deadline is not None and deadline <= now


def _deadline_exceeded() -> Failure:
    return Failure(Reason.DEADLINE_EXCEEDED, "the request's deadline has passed")
