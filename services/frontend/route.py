"""Chooses the worker for each attempt, and remembers what became of it."""

import asyncio
import random
from typing import Generic

from services.errors import Failure, Reason
from services.frontend.busy import BusyThresholds
from services.frontend.eligible import AnyWorker, Workers, choose, no_workers, refusal, view
from services.frontend.retry_after import RETRY_AFTER_S_MIN, jittered_s
from services.request import Call, Finish, Layer, Request, Sink


class Route(Generic[AnyWorker]):
    """Above the transport: the call names its worker."""

    def __init__(self, inner: Layer, pool: Workers[AnyWorker], busy: BusyThresholds, rng: random.Random) -> None:
        self._inner = inner
        self._pool = pool
        self._busy = busy
        self._rng = rng

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        session = await self._pick(request, call)
        try:
            call.attempt.worker = session.key
            return await self._inner(request, call, sink)
        except Failure as failure:
            if failure.traits.blames_worker:
                self._pool.quarantine(session)
            elif failure.reason is Reason.WORKER_AT_CAPACITY:
                session.mark_full()
                failure.retry_after_s = jittered_s(failure.retry_after_s or RETRY_AFTER_S_MIN, self._rng)
            elif failure.reason is Reason.DRAINING:
                session.is_draining = True
            raise

    async def _pick(self, request: Request, call: Call) -> AnyWorker:
        """An eligible worker. A call that has lost its worker waits for another until `call.replacement_deadline`.

        It need not be told of a worker that is not busy any more: busy ones are good enough for it.
        """
        clock, card = asyncio.get_running_loop().time, call.card
        assert card is not None, "preprocess names the card"
        is_under_way = call.replacement_deadline is not None
        try:
            async with asyncio.timeout_at(call.replacement_deadline):
                while True:
                    change = self._pool.next_change
                    seen = view(self._pool.sessions(card), call, clock(), self._busy.acting(request.model))
                    if eligible := seen.eligible(is_under_way=is_under_way):
                        return choose(eligible, self._rng)
                    if not is_under_way:
                        raise refusal(seen, request.model, 1, self._rng)
                    await change.wait()
        except TimeoutError:
            detail = f"no other worker of {request.model!r} had room or came in time"
            raise no_workers(detail, self._rng) from None
