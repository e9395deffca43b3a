"""Chooses the worker for each attempt, and reports to routing how the attempt failed."""

import asyncio
from collections.abc import Sequence
from functools import partial

from msgspec.structs import replace

from services.core.call import Call
from services.core.errors import Failure, Reason, refused_for
from services.core.generation.kept import Copy
from services.core.interface import Finish, Layer, Sink
from services.core.request import Request
from services.frontend.routing.balancer import Balancer
from services.frontend.routing.candidate import Candidate
from services.frontend.routing.policy import Workers
from services.frontend.routing.worker_set import WorkerSet


class Route:
    """Above the transport, which sends the request on the session of the chosen worker."""

    def __init__(self, inner: Layer, pool: Workers, balancer: Balancer) -> None:
        self._inner = inner
        self._pool = pool
        self._balancer = balancer

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        call = _without_broken_group(call)
        while (worker := self._adopted(request, call)) is not None:
            try:
                return await self._send(worker, request, call, sink)
            except Failure as failure:
                is_gone = failure.reason is Reason.STREAM_NOT_FOUND  # Another frontend has found a better record.
                if not (is_gone and _copies(request, call)):
                    raise
        worker = self._worker_of_group(call) or await self._choose(request, call)
        return await self._send(worker, request, call, sink)

    async def _send(self, worker: Candidate, request: Request, call: Call, sink: Sink) -> Finish:
        try:
            call.attempt.session = worker.session
            return await self._inner(request, call, sink)
        except Failure as failure:
            self._on_failure(worker, failure, request, call)
            raise

    def _on_failure(self, worker: Candidate, failure: Failure, request: Request, call: Call) -> None:
        if failure.traits.blames_worker:
            self._pool.quarantine(worker)
        elif failure.reason is Reason.WORKER_AT_CAPACITY:
            worker.on_refused(refused_for(failure), _count(call), _tokens(request, call), call.tenant)
            self._balancer.rejections.set_retry_after(failure)
        elif failure.reason is Reason.DRAINING:
            worker.is_draining = True

    def _adopted(self, request: Request, call: Call) -> Candidate | None:
        """The worker that has the choice already, if the answer is resumed; None if the choice needs one.

        Each record is tried once, the best one first. Raises DISCONNECTED if all workers that have one are lost.
        """
        call.attempt.adopts, is_lost = None, False
        for copy in iter(partial(_next_copy, request, call), None):
            if (worker := self._pool.candidate(copy.session)) is not None:
                call.attempt.adopts = copy
                return worker
            is_lost = True
        if is_lost:
            raise Failure(Reason.DISCONNECTED, "the worker was lost before the answer could be resumed")
        return None

    def _worker_of_group(self, call: Call) -> Candidate | None:
        """The worker that has reserved room for each choice of the group; None for the first choice, which chooses it.

        Raises CANNOT_CONNECT if that worker is lost.
        """
        if call.choice_group is None or call.choice_group.worker is None:
            return None
        worker = self._pool.candidate(call.choice_group.worker)
        if worker is None:
            raise Failure(Reason.CANNOT_CONNECT, "the worker was lost before the choice was sent")
        return worker

    async def _choose(self, request: Request, call: Call) -> Candidate:
        """A worker with room. A call that lost its worker waits for another until `call.replacement_deadline`.

        Raises the balancer's rejection.
        """
        assert call.card is not None, "preprocess sets the card"
        worker_set = self._pool.worker_set(call.card)
        chosen = self._find(worker_set, request, call) or await self._wait_for_room(worker_set, request, call)
        if call.choice_group is not None:
            call.choice_group.worker = chosen.key
        return chosen

    def _find(self, worker_set: WorkerSet, request: Request, call: Call) -> Candidate | None:
        """A worker with room now; None if a call that lost its worker has to wait for one."""
        if call.replacement_deadline is not None:
            needs = self._balancer.needs(request.model, call, _count(call), _tokens(request, call))
            return self._balancer.choose_other(worker_set, needs)
        return self._balancer.choose(worker_set, self._balancer.needs(request.model, call, _count(call)))

    async def _wait_for_room(self, worker_set: WorkerSet, request: Request, call: Call) -> Candidate:
        """Raises NO_WORKERS at the deadline.

        A worker that is no longer busy need not wake the call, because busy workers are eligible for it.
        """
        try:
            async with asyncio.timeout_at(call.replacement_deadline):
                with worker_set.wait_queue.join() as waiter:
                    while True:
                        await waiter.wait_turn()
                        if (found := self._find(worker_set, request, call)) is not None:
                            return found
                        waiter.wait_again(is_room_left=bool(worker_set.open or worker_set.busy))
        except TimeoutError:
            raise self._balancer.rejections.not_replaced(request.model) from None


def _copies(request: Request, call: Call) -> Sequence[Copy]:
    """The records of the choice that have not been tried.

    None once there are tokens: those of another record need not be what follows them.
    """
    kept = call.kept
    if kept is None or len(request.generated_token_ids) > kept.base:
        return ()
    return kept.generation.copies.get(kept.index_of(request.choice), ())


def _next_copy(request: Request, call: Call) -> Copy | None:
    """Take the best one of these."""
    if not _copies(request, call):
        return None
    assert call.kept is not None, "what has copies is kept"
    return call.kept.generation.take_copy(call.kept.index_of(request.choice))


def _count(call: Call) -> int:
    """How many choices need room at once."""
    return 1 if call.choice_group is None else call.choice_group.count


def _tokens(request: Request, call: Call) -> int:
    """How many prompt tokens these choices have together."""
    return _count(call) * request.token_count


def _without_broken_group(call: Call) -> Call:
    """The call, without its group if a choice left that before a worker was chosen: a group goes complete or not."""
    if call.choice_group is None or call.choice_group.worker is not None or call.choice_group.is_complete:
        return call
    return replace(call, choice_group=None)
