"""Chooses the worker for each attempt, and remembers what became of it."""

import asyncio
import random
from typing import Generic

from msgspec.structs import replace

from services.core.call import Call
from services.core.errors import RETRY_AFTER_S_MIN, Failure, Reason, jittered_s, refused_for
from services.core.interface import Finish, Layer, Sink
from services.core.request import Request
from services.frontend.routing.balancer import Balancer
from services.frontend.routing.policy import AnyWorker, Workers
from services.frontend.routing.rejection import jittered, no_workers
from services.frontend.routing.thresholds import BusyThresholds
from services.frontend.routing.worker_set import WorkerSet


class Route(Generic[AnyWorker]):
    """Above the transport: the call names its worker."""

    def __init__(self, inner: Layer, pool: Workers[AnyWorker], busy: BusyThresholds, rng: random.Random) -> None:
        self._inner = inner
        self._pool = pool
        self._balancer: Balancer[AnyWorker] = Balancer(busy, rng)
        self._rng = rng

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        call = _alone_if_parted(call)
        session = self._find_group(call) or await self._pick(request, call)
        try:
            call.attempt.session = session.session
            return await self._inner(request, call, sink)
        except Failure as failure:
            if failure.traits.blames_worker:
                self._pool.quarantine(session)
            elif failure.reason is Reason.WORKER_AT_CAPACITY:
                session.on_refused(refused_for(failure), _count(call), _tokens(request, call))
                failure.retry_after_s = jittered_s(failure.retry_after_s or RETRY_AFTER_S_MIN, self._rng)
            elif failure.reason is Reason.DRAINING:
                session.is_draining = True
            raise

    def _find_group(self, call: Call) -> AnyWorker | None:
        """The worker where the first of the choices has got a place for each of them; None for the first itself."""
        if call.choice_group is None or call.choice_group.worker is None:
            return None
        session = self._pool.candidate(call.choice_group.worker)
        if session is None:
            raise Failure(Reason.CANNOT_CONNECT, "the worker was lost before the choice was sent")
        return session

    async def _pick(self, request: Request, call: Call) -> AnyWorker:
        """An eligible worker. A call that has lost its worker waits for another until `call.replacement_deadline`."""
        assert call.card is not None, "preprocess names the card"
        worker_set = self._pool.worker_set(call.card)
        chosen = self._find(worker_set, request, call) or await self._wait_in_line(worker_set, request, call)
        if call.choice_group is not None:
            call.choice_group.worker = chosen.key
        return chosen

    def _find(self, worker_set: WorkerSet[AnyWorker], request: Request, call: Call) -> AnyWorker | None:
        """The worker, if there is one now. Raises for a new call for which there is none."""
        if call.replacement_deadline is not None:
            needs = self._balancer.needs(request.model, call, _count(call), _tokens(request, call))
            return self._balancer.find(worker_set, needs, is_under_way=True)
        needs = self._balancer.needs(request.model, call, _count(call))  # Not for its tokens: it asks, and is told.
        if (found := self._balancer.find(worker_set, needs)) is None:
            raise self._balancer.refusal(worker_set, needs, request.model)
        return found

    async def _wait_in_line(self, worker_set: WorkerSet[AnyWorker], request: Request, call: Call) -> AnyWorker:
        """Raises NO_WORKERS.

        It need not be told of a worker that is not busy any more: busy ones are good enough for it.
        """
        try:
            async with asyncio.timeout_at(call.replacement_deadline):
                with worker_set.line.place() as place:
                    while True:
                        await place.wait_call()
                        if (found := self._find(worker_set, request, call)) is not None:
                            return found
                        place.keep(is_room_left=bool(worker_set.open or worker_set.busy))
        except TimeoutError:
            detail = f"no other worker of {request.model!r} had room or came in time"
            raise jittered(no_workers(detail), self._rng) from None


def _count(call: Call) -> int:
    """How many choices go together."""
    return 1 if call.choice_group is None else call.choice_group.count


def _tokens(request: Request, call: Call) -> int:
    """What they have to read together, if all of them have to wait."""
    return _count(call) * request.token_count


def _alone_if_parted(call: Call) -> Call:
    """Choices go together all of them, or each alone: what is left of a party is none."""
    if call.choice_group is None or call.choice_group.worker is not None or call.choice_group.is_complete:
        return call
    return replace(call, choice_group=None)
