"""The layers that frontends and workers share, and the function that stacks layers."""

import asyncio
from collections.abc import Callable
from functools import cached_property

import structlog

from services.core.call import Call
from services.core.errors import Failure, Reason
from services.core.gate import Gate
from services.core.interface import Delta, Finish, Layer, Sink
from services.core.request import Request
from services.runtime.cancel_scope import CancelScope

log = structlog.get_logger()


def stack(*wraps: Callable[[Layer], Layer], innermost: Layer) -> Layer:
    """Combine layers into one. `wraps`: outermost first."""
    layer = innermost
    for wrap in reversed(wraps):
        layer = wrap(layer)
    return layer


def bug_failure(error: Exception, request_id: str) -> Failure:
    """Log an unexpected exception and return the failure for the client, which reveals nothing about it."""
    log.error("bug", request_id=request_id, exc_info=error)
    return Failure(Reason.INTERNAL, f"an internal error ended request {request_id}")


async def outcome_of(layer: Layer, request: Request, call: Call, sink: Sink) -> Finish | Failure:
    """Run a request and return its failure instead of raising it, so that the caller first sends what is buffered."""
    try:
        return await layer(request, call, sink)
    except Failure as failure:
        return failure


class Guard:
    """Above every layer that can have a bug: only Failure leaves a pipeline, and every bug is logged."""

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
    """Above every wait: the deadline covers the time spent waiting."""

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


class Accept:
    """Above everything that takes time or a slot: a draining process takes no requests, and can end those it has."""

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
        if ending.failure is not None:  # Even if the answer is complete: its client was told of the failure.
            raise ending.failure
        assert finish is not None, "only an ending cancels the scope"
        return finish

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()  # Asked once: it is a system call before Python 3.12.


class Conclude:
    """Above an engine that clients call without a frontend: the last delta of a stream says why it ended."""

    def __init__(self, inner: Layer) -> None:
        self._inner = inner

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        finish = await self._inner(request, call, sink)
        assert finish.usage is not None, "Execute counts the tokens"
        position = finish.usage.completion_tokens
        last = Delta(position, (), choice=request.choice, finish_reason=finish.reason, usage=finish.usage)
        sink.deliver(last)
        return finish
