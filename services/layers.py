"""The layers that frontends and workers share, and how layers are put together."""

import asyncio
from collections.abc import Callable
from functools import cached_property
from itertools import chain
from typing import Any

import structlog

from services.errors import Failure, Reason
from services.groups import leaf_of
from services.request import Call, Cause, Delta, Ending, Finish, Layer, Request, Sink
from services.scope import CancelScope

log = structlog.get_logger()


def stack(*wraps: Callable[[Layer], Layer], innermost: Layer) -> Layer:
    """The layers as one, outermost first."""
    layer = innermost
    for wrap in reversed(wraps):
        layer = wrap(layer)
    return layer


def bug_failure(error: Exception, request_id: str) -> Failure:
    """Log an error that nobody foresaw, and give the failure that the client sees: it says nothing of the inside."""
    log.error("bug", request_id=request_id, exc_info=error)
    return Failure(Reason.INTERNAL, f"an internal error ended request {request_id}")


async def outcome_of(layer: Layer, request: Request, call: Call, sink: Sink) -> Finish | Failure:
    """What became of a request. A failure is returned: who writes to a client sends first what came before it."""
    try:
        return await layer(request, call, sink)
    except Failure as failure:
        return failure


class Guard:
    """Above all that can have a bug: nothing but Failure leaves a pipeline, and a bug is never silent."""

    def __init__(self, inner: Layer) -> None:
        self._inner = inner

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        try:
            return await self._inner(request, call, sink)
        except Failure:
            raise
        except Exception as error:
            raise bug_failure(error, call.request_id) from error


class Deadline:
    """Above every wait: waiting for anything spends the caller's time."""

    def __init__(self, inner: Layer) -> None:
        self._inner = inner

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        if call.deadline is None:
            return await self._inner(request, call, sink)
        scope = asyncio.timeout_at(call.deadline)
        try:
            async with scope:
                return await self._inner(request, call, sink)
        except TimeoutError:
            if scope.expired():
                raise Failure(Reason.DEADLINE_EXCEEDED, "the request's deadline has passed") from None
            raise


class Gate:
    """Whether a process takes new requests, and which it has."""

    def __init__(self) -> None:
        self.is_draining = False
        self._inside: dict[str, Ending] = {}  # request id → of a request that has it
        self._namesakes: dict[str, set[Ending]] = {}  # request id → of further ones; mostly there are none
        self._quiet = asyncio.Event()
        self._quiet.set()

    @property
    def count(self) -> int:
        """How many requests are inside."""
        return len(self._inside) + sum(map(len, self._namesakes.values()))

    def enter(self, call: Call) -> None:
        """Take a request in. Raises DRAINING."""
        if self.is_draining:
            raise Failure(Reason.DRAINING, "the server is leaving and takes no new requests", retry_after_s=1.0)
        if self._inside.setdefault(call.request_id, call.ending) is not call.ending:
            self._namesakes.setdefault(call.request_id, set()).add(call.ending)
        self._quiet.clear()

    def leave(self, call: Call) -> None:
        """The request is done."""
        name, namesakes = call.request_id, self._namesakes.get(call.request_id)
        if namesakes is None:
            del self._inside[name]
        elif self._inside[name] is call.ending:
            self._inside[name] = namesakes.pop()
        else:
            namesakes.discard(call.ending)
        if namesakes is not None and not namesakes:
            del self._namesakes[name]
        if not self._inside:
            self._quiet.set()

    def cancel(self, request_id: str) -> int:
        """End every request of that name that is inside and not ended yet. Returns how many those are. Idempotent."""
        first = self._inside.get(request_id)
        named = () if first is None else (first, *self._namesakes.get(request_id, ()))
        endings = [ending for ending in named if ending.failure is None]
        for ending in endings:
            ending.fail(Failure(Reason.CANCELLED, "the request was cancelled by its name"), Cause.EXPLICIT)
        return len(endings)

    def fail_all(self, failure: Failure) -> None:
        """End every request that is inside with this failure; `wait_quiet` says when they are gone."""
        for ending in [*self._inside.values(), *chain.from_iterable(self._namesakes.values())]:
            ending.fail(failure, Cause.DRAIN)

    async def wait_quiet(self, timeout_s: float) -> bool:
        """Until no request is left; False if some are after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._quiet.wait()
        except TimeoutError:
            return False
        return True


class Accept:
    """Above everything that takes time or a slot: a process that leaves takes nothing new, and can end what it has."""

    def __init__(self, inner: Layer, gate: Gate) -> None:
        self._inner = inner
        self._gate = gate

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        ending, finish = call.ending, None
        self._gate.enter(call)
        try:
            with CancelScope(self._loop) as scope:
                ending.listen(scope.cancel)
                finish = await self._inner(request, call, sink)
        finally:
            ending.listen(None)
            self._gate.leave(call)
        if ending.failure is not None:  # Even if the answer was complete: who ended it has let its client go.
            raise ending.failure
        assert finish is not None, "only its ending cuts it short"
        return finish

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()  # A system call, so only once.


class Conclude:
    """Above an engine that clients speak to without a frontend: a stream's last delta says why it ended."""

    def __init__(self, inner: Layer) -> None:
        self._inner = inner

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        finish = await self._inner(request, call, sink)
        assert finish.usage is not None, "the engine's side counts"
        position = finish.usage.completion_tokens
        last = Delta(position, (), choice=request.choice, finish_reason=finish.reason, usage=finish.usage)
        sink.deliver(last)
        return finish


def root_cause(group: BaseExceptionGroup[Any]) -> BaseException:
    """The first exception in a group that is not a group: who opens a TaskGroup with one child that matters, asks.

    Raises CancelledError when the asking task was cancelled meanwhile: before Python 3.13 a TaskGroup that fails
    forgets that, and a loop around it would go on for ever.
    """
    asking = asyncio.current_task()
    if asking is not None and asking.cancelling():
        raise asyncio.CancelledError
    return leaf_of(group)
