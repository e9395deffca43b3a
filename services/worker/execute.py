"""Runs requests on the engine: admits them, and delivers the engine's outputs to the sink of each."""

import asyncio
from collections.abc import Mapping, Sequence
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
from services.core.tenant import Tenant
from services.worker.counters import Counters
from services.worker.dispatcher import Dispatcher, Limits, TenantUsage
from services.worker.engine import Engine, Output
from services.worker.fairness.account import Account

log = structlog.get_logger()

ATTACH = "attach"
"""The `endpoint` of calls that arrived on a session: without another cause, their cancel means the session ended."""


class _ActiveRequest:
    """One request in the worker: its sink, the position of its answer, and how it ends.

    `account`: its tenant's, once it has a slot. `arrived_at`: in event-loop time. `wait_s`: how long it may wait.
    `timer`: ends its wait, while it waits. `was_submitted`: whether the engine may know it. `ended`: the finish or the
    failure.
    """

    __slots__ = (
        "account",
        "arrived_at",
        "attempt",
        "call",
        "ended",
        "has_tokens",
        "position",
        "request",
        "sink",
        "timer",
        "wait_s",
        "was_submitted",
    )

    account: Account

    def __init__(
        self, request: Request, call: Call, sink: Sink, arrived_at: float, wait_s: float, ended: asyncio.Future[Finish]
    ) -> None:
        self.request = request
        self.call = call
        self.attempt = call.attempt
        self.sink = sink
        self.position = len(request.generated_token_ids)
        self.has_tokens = False
        self.arrived_at = arrived_at
        self.wait_s = wait_s
        self.timer: asyncio.TimerHandle | None = None
        self.was_submitted = False
        self.ended = ended

    def apply(self, output: Output) -> None:
        """Deliver the tokens of an output, and end the request if the output is its last."""
        if self.ended.done():
            return
        if output.token_ids:
            if not self.has_tokens:
                self.has_tokens, self.attempt.phase = True, Phase.RUNNING
            self.sink.deliver(
                Delta(self.position, output.token_ids, choice=self.request.choice, logprobs=output.logprobs)
            )
            count = len(output.token_ids)
            self.position += count
            self.account.output_tokens += count
        if output.failure is not None:
            self.fail(output.failure)
        elif output.finish is not None:
            self.attempt.phase = Phase.ENDED
            self.ended.set_result(Finish(output.finish, Usage(len(self.request.prompt_token_ids), self.position)))

    def fail(self, failure: Failure, cause: Cause | None = None) -> None:
        """End the request. `cause`: why it ends early; None: it has ended, and the engine has removed it."""
        if self.ended.done():
            return
        if cause is None:
            self.attempt.phase = Phase.ENDED
        elif self.call.ending.cause is None:
            self.call.ending.cause = cause
        self.ended.set_exception(failure)

    def cause(self, now: float) -> Cause:
        """Why the request ended early."""
        if self.call.ending.cause is not None:
            return self.call.ending.cause
        if _has_passed(self.call.deadline, now):
            return Cause.DEADLINE
        return Cause.SESSION_LOST if self.call.endpoint == ATTACH else Cause.CLIENT_DISCONNECT

    def is_overdue(self, now: float) -> bool:
        """Whether it must not start any more."""
        return _has_passed(self.call.deadline, now) or _has_passed(self.arrived_at + self.wait_s, now)

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()


class Execute:
    """Innermost layer of the worker: only the engine is below it.

    Positions count from the first token of the whole answer, so a continued request starts after the tokens that it
    brings. The choices of a group are admitted together, when the first of them arrives.
    """

    def __init__(self, engine: Engine, limits: Limits) -> None:
        self.limits = limits
        self.counters = Counters()
        self._engine = engine
        self._keys = count(1)
        self._active: dict[int, _ActiveRequest] = {}
        self._dispatcher = Dispatcher(limits, self._start, self._now, self._displace)

    @property
    def running_count(self) -> int:
        return self._dispatcher.running_count

    @property
    def waiting_count(self) -> int:
        return self._dispatcher.waiting_count

    @property
    def service_time_s(self) -> float | None:
        """How long a request holds its slot, on average; None: no request has ended yet."""
        return self._dispatcher.service_time_s

    def usage(self) -> Mapping[str, TenantUsage]:
        """What each tenant has had and has waiting, by its label in metrics."""
        return self._dispatcher.usage()

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        """The running loop, cached: before Python 3.12, looking it up is a system call, a tenth of a request's cost."""
        return asyncio.get_running_loop()

    def _now(self) -> float:
        """Event-loop time, in seconds."""
        return self._loop.time()

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        now = self._now()
        if _has_passed(call.deadline, now):
            self.counters.cancelled[Cause.DEADLINE, Phase.QUEUED] += 1
            raise _deadline_exceeded()
        key = self._admit_request(request, call)
        wait_s = self.limits.wait_s
        if (own_s := call.tenant.queue_timeout_s) is not None:
            wait_s = min(wait_s, own_s)
        active = self._active[key] = _ActiveRequest(request, call, sink, now, wait_s, self._loop.create_future())
        try:
            if self._dispatcher.is_running(key):
                self._begin(key, active)
            elif self._dispatcher.is_waiting(key):
                active.timer = self._loop.call_later(wait_s, self._expire, key)
            else:
                self._displace(key)  # Its group has given way before this choice arrived.
            return await active.ended
        finally:
            self._leave(key, active)

    def emit(self, outputs: Sequence[Output]) -> None:
        """Deliver the outputs of one step. An exception while one request handles its output ends only that request."""
        for output in outputs:
            active = self._active.get(output.key)
            if active is None:
                continue
            try:
                active.apply(output)
            except Exception as error:
                is_last = output.finish is not None or output.failure is not None
                active.fail(bug_failure(error, active.call.request_id), None if is_last else Cause.INTERNAL)

    def fail_all(self, failure: Failure, cause: Cause | None = None) -> None:
        """End all requests. `cause`: why they end early; None: the engine is dead, so they have ended."""
        for active in self._active.values():
            active.fail(failure.copy(), cause)

    def _admit_request(self, request: Request, call: Call) -> int:
        """Get a slot or a place. Returns the request's key in the dispatcher. Raises the failures of `admit`."""
        try:
            if call.choice_group is None:
                return self._admit(1, request.token_count, call.tenant)[0]
            return call.choice_group.claim(request.choice, partial(self._reserve, request.token_count, call.tenant))
        except Failure as failure:
            self.counters.refused += failure.reason is Reason.WORKER_AT_CAPACITY
            raise

    def _admit(self, count: int, token_count: int, tenant: Tenant) -> Sequence[int]:
        keys = [next(self._keys) for _ in range(count)]
        self._dispatcher.admit(keys, token_count, tenant)
        return keys

    def _reserve(self, token_count: int, tenant: Tenant, choices: int) -> Reservation:
        return self._admit(choices, token_count, tenant), partial(self._dispatcher.release, was_used=False)

    def _start(self, key: Any) -> None:
        """Called by the dispatcher when a request gets a slot. A choice that has not arrived yet starts on arrival."""
        if (active := self._active.get(key)) is None:
            return
        active.stop_timer()
        if active.is_overdue(self._now()):
            self._end_waiting(active)  # Its timer is due, and fires only after the other callbacks of this turn.
        elif not active.ended.done():  # Done: the request was cancelled in this turn of the loop.
            self._begin(key, active)

    def _begin(self, key: int, active: _ActiveRequest) -> None:
        self.counters.wait_s.observe(0 if active.timer is None else self._now() - active.arrived_at)
        active.was_submitted = True
        active.account = self._dispatcher.account(key)
        try:
            self._engine.submit(key, active.request)
            active.attempt.begin()
        except Failure as failure:
            self.counters.refused += failure.reason is Reason.WORKER_AT_CAPACITY
            active.fail(failure)
        except Exception:
            log.exception("submitting a request to the engine failed")
            active.fail(Failure(Reason.ENGINE_ERROR, "the engine failed to start the request"))

    def _expire(self, key: int) -> None:
        """Remove the request from the queue at once, so that it cannot start before its task runs."""
        self._dispatcher.release(key)
        self._end_waiting(self._active[key])

    def _end_waiting(self, active: _ActiveRequest) -> None:
        """Fail a request that has waited too long. If its own deadline has passed too, that is the reason."""
        if _has_passed(active.call.deadline, self._now()):
            active.fail(_deadline_exceeded(), Cause.DEADLINE)
        elif not active.ended.done():
            self.counters.queue_timeouts += 1
            detail = f"waited {active.wait_s:g} s for a slot of a worker at capacity"
            active.fail(self._dispatcher.refusal(RefusedFor.QUEUE_TIMEOUT, detail, active.wait_s))

    def _displace(self, key: Any) -> None:
        """Called by the dispatcher when a waiting request gives way. A choice that has not arrived fails on arrival."""
        active = self._active.get(key)
        if active is not None and not active.ended.done():
            self.counters.refused += 1
            detail = "Server overloaded: worker at capacity, and other tenants hold less of its queue"
            active.fail(self._dispatcher.refusal(RefusedFor.TENANT_SHARE, detail))

    def _leave(self, key: int, active: _ActiveRequest) -> None:
        del self._active[key]
        active.stop_timer()
        if active.attempt.phase is not Phase.ENDED:
            self._count_early_end(active)
        try:
            if active.was_submitted:
                self._engine.cancel(key)  # Before the release: the next request must not find the engine full.
        finally:
            self._dispatcher.release(key, was_used=active.attempt.has_begun)

    def _count_early_end(self, active: _ActiveRequest) -> None:
        phase, cause = active.attempt.phase, active.cause(self._now())
        self.counters.aborted += phase is not Phase.QUEUED
        self.counters.queue_deadlines += phase is Phase.QUEUED and cause is Cause.DEADLINE
        if cause is not Cause.SIGNAL:  # Signals are counted where they arrive, which may be after the end.
            self.counters.cancelled[cause, phase] += 1


def _has_passed(deadline: float | None, now: float) -> bool:
    return deadline is not None and deadline <= now


def _deadline_exceeded() -> Failure:
    return Failure(Reason.DEADLINE_EXCEEDED, "the request's deadline has passed")
