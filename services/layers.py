"""The layers that frontends and workers share, and how layers are put together."""

import asyncio
from collections.abc import Callable
from typing import Any

import structlog

from services.errors import Failure, Reason
from services.request import Call, Finish, Layer, Request, Sink

log = structlog.get_logger()


def stack(*wraps: Callable[[Layer], Layer], innermost: Layer) -> Layer:
    """The layers as one, outermost first."""
    layer = innermost
    for wrap in reversed(wraps):
        layer = wrap(layer)
    return layer


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
            log.exception("bug: the pipeline raised something other than a failure", request_id=call.request_id)
            raise Failure(Reason.INTERNAL, f"internal error: report request {call.request_id}") from error


class Deadline:
    """Above every wait: waiting for anything spends the caller's time."""

    def __init__(self, inner: Layer) -> None:
        self._inner = inner

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        scope = asyncio.timeout_at(call.deadline)
        try:
            async with scope:
                return await self._inner(request, call, sink)
        except TimeoutError:
            if scope.expired():
                raise Failure(Reason.DEADLINE_EXCEEDED, "the request's deadline has passed") from None
            raise


class Accept:
    """Above everything that takes a slot: a process that leaves takes nothing new, and knows when it is quiet."""

    def __init__(self, inner: Layer) -> None:
        self._inner = inner
        self._is_draining = False
        self._count = 0
        self._quiet = asyncio.Event()
        self._quiet.set()

    @property
    def count(self) -> int:
        """Requests inside."""
        return self._count

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self._is_draining = True

    async def wait_quiet(self) -> None:
        """Until no request is inside. The caller bounds the wait."""
        await self._quiet.wait()

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        if self._is_draining:
            raise Failure(Reason.DRAINING, "the server is leaving and takes no new requests")
        self._count += 1
        self._quiet.clear()
        try:
            return await self._inner(request, call, sink)
        finally:
            self._count -= 1
            if self._count == 0:
                self._quiet.set()


def root_cause(group: BaseExceptionGroup[Any]) -> BaseException:
    """The first exception in a group that is not a group: who opens a TaskGroup with one child that matters, asks."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
