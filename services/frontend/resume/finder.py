"""Finds an answer on the workers: asks all of them, and chooses for each choice the one that is furthest."""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Protocol

import structlog

from services.core.errors import Failure, Reason
from services.core.generation.kept import EPOCH_BITS, Copy, Generation, expired, scoped_id
from services.core.generation.presentation import Presentation, decode_presentation
from services.core.generation.resumption import bases_of, room_of
from services.core.tenant import Tenant
from services.frontend.routing.rejection import no_workers
from services.frontend.session.session import WorkerSession
from services.rpc.codec import continuation_from_wire
from services.stubs import worker_pb2

log = structlog.get_logger()

LOCATE_S_MAX = 2.0
"""How long a worker may take to say what it has, and a frontend to reach the workers that discovery names."""
EPOCH_AHEAD_MS_MAX = 86_400_000
"""How far the clocks of two frontends may differ: epochs begin with the time. Without this bound, a worker with a wrong
epoch could leave no higher one to whoever resumes the answer."""


class Sessions(Protocol):
    """The sessions of this frontend."""

    def all_sessions(self) -> list[WorkerSession]: ...

    @property
    def has_all(self) -> bool: ...

    @property
    def next_change(self) -> asyncio.Event: ...


@dataclass(frozen=True, slots=True)
class _Found:
    """What one worker has of an answer."""

    session: WorkerSession
    located: worker_pb2.Located


@dataclass(frozen=True, slots=True)
class _Holder(_Found):
    """A worker that has a part of the answer. `epoch`: the highest of its holdings."""

    presentation: Presentation
    epoch: int


class GenerationFinder:
    """Answers where generations are, from the workers themselves: no frontend remembers any."""

    def __init__(self, sessions: Sessions, rng: random.Random) -> None:
        self._sessions = sessions
        self._rng = rng

    async def find(self, generation_id: bytes, tenant: Tenant) -> tuple[Presentation, Generation]:
        """The answer's presentation, and its generation with the copies of each choice that workers have.

        An answer of another tenant is one that does not exist. Raises STREAM_NOT_FOUND, STREAM_EXPIRED, NO_WORKERS if a
        worker that may have it cannot be asked, or PROTOCOL_VIOLATION if what they say cannot be.
        """
        founds, is_complete = await self._ask_all(scoped_id(generation_id, tenant))
        holders = _holders(founds)
        if not (holders and (self._sessions.has_all or _have_all_choices(holders))):
            await self._wait_for_sessions()
            founds, is_complete = await self._ask_all(scoped_id(generation_id, tenant))
            holders = _holders(founds)
        if holders:
            return self._resumed(generation_id, tenant, holders)
        if any(found.located.is_expired for found in founds):
            raise expired()
        if not (is_complete and self._sessions.has_all):
            raise no_workers("a worker that may have this answer is not known yet, or cannot be reached at the moment")
        raise Failure(Reason.STREAM_NOT_FOUND, "no worker has an answer with this id")

    async def cancel(self, generation_id: bytes, tenant: Tenant) -> bool:
        """Cancel all choices, whichever frontends own them, and drop their records. Returns whether any of them ran."""
        await self._wait_for_sessions()
        founds, _ = await self._ask_all(scoped_id(generation_id, tenant), cancels=True)
        return any(found.located.cancelled for found in founds)

    async def _wait_for_sessions(self) -> None:
        """A frontend that has just started may not have reached the worker yet."""
        try:
            async with asyncio.timeout(LOCATE_S_MAX):
                while not self._sessions.has_all:
                    await self._sessions.next_change.wait()
        except TimeoutError:
            return

    async def _ask_all(self, generation_id: bytes, *, cancels: bool = False) -> tuple[Sequence[_Found], bool]:
        """What each worker has, and whether all have replied in time."""
        sessions = self._sessions.all_sessions()
        asked = [session.generations.locate(generation_id, cancels=cancels) for session in sessions]
        try:
            if asked:
                await asyncio.wait(asked, timeout=LOCATE_S_MAX)
        finally:
            for one in asked:
                one.cancel()  # What has been found may be enough.
        replies = [None if one.cancelled() else one.result() for one in asked]
        founds = [_Found(one, reply) for one, reply in zip(sessions, replies, strict=True) if reply is not None]
        # In the same order on all frontends, so that of two resumes at once both take the same of two equal copies.
        founds.sort(key=lambda found: found.session.record.instance_id)
        return founds, len(founds) == len(sessions)

    def _resumed(
        self, generation_id: bytes, tenant: Tenant, holders: Sequence[_Holder]
    ) -> tuple[Presentation, Generation]:
        """The answer as the newest of its owners has presented it. Records of an older answer are not needed."""
        newest = max(holders, key=lambda holder: holder.epoch)
        generation = Generation(generation_id, newest.presentation.grace_s, is_told=True, tenant=tenant)
        generation.presentation = newest.located.presentation
        generation.is_resumed = True
        generation.epoch = ((newest.epoch >> EPOCH_BITS) + 1 << EPOCH_BITS) + self._rng.getrandbits(EPOCH_BITS)
        ranked: dict[int, list[tuple[tuple[bool, bool, int], Copy]]] = {}
        for holder in holders:
            session, is_newest = holder.session, holder.located.presentation == generation.presentation
            for one in holder.located.holdings:
                discard = partial(session.generations.discard, generation.id, one.index, generation.epoch)
                if not is_newest:
                    generation.leave(one.index, session.record.instance_id, discard)
                    continue
                is_over = one.is_finished or one.has_failed
                copy = Copy(session=session.key, token_count=one.token_count, is_over=is_over, discard=discard)
                if (continuation := continuation_from_wire(one.continuation)) is not None:
                    generation.continuations[one.index] = continuation
                ranked.setdefault(one.index, []).append(((one.has_failed, not one.is_finished, -one.token_count), copy))
        bases = bases_of(newest.presentation.request)
        for index, copies in ranked.items():
            generation.copies[index] = best, *_ = [copy for _, copy in sorted(copies, key=itemgetter(0))]
            generation.record_ends[index] = bases[index] + best.token_count
        return newest.presentation, generation


def _holders(founds: Sequence[_Found]) -> Sequence[_Holder]:
    """The workers that have a part of the answer. Raises PROTOCOL_VIOLATION if that is wrong of all of them."""
    holders: list[_Holder] = []
    failure: Failure | None = None
    for found in founds:
        try:
            if found.located.holdings:
                holders.append(_holder(found))
        except Failure as error:
            failure = error
            log.warning("worker broke the protocol", instance=found.session.record.instance_id, why=str(error))
    if failure is not None and not holders:
        raise failure
    return holders


def _have_all_choices(holders: Sequence[_Holder]) -> bool:
    """Whether these workers have every choice of the answer. One that no engine has begun with is nowhere."""
    found = {holding.index for holder in holders for holding in holder.located.holdings}
    return len(found) == len(bases_of(holders[0].presentation.request))


def _holder(found: _Found) -> _Holder:
    """What was found, checked. Raises PROTOCOL_VIOLATION if the worker cannot have that."""
    presentation, holdings = decode_presentation(found.located.presentation), found.located.holdings
    room = room_of(presentation.request)
    indexes = {holding.index for holding in holdings}
    epoch = max(holding.epoch for holding in holdings)
    if len(indexes) != len(holdings) or max(indexes) >= len(room):
        raise Failure(Reason.PROTOCOL_VIOLATION, f"a worker has choices that its answer does not have: {indexes}")
    if any(holding.token_count > room[holding.index] for holding in holdings):
        raise Failure(Reason.PROTOCOL_VIOLATION, "a worker has more tokens than its answer may have")
    if epoch >> EPOCH_BITS > time.time() * 1000 + EPOCH_AHEAD_MS_MAX:
        raise Failure(Reason.PROTOCOL_VIOLATION, f"a worker has an answer of epoch {epoch}, which is yet to come")
    return _Holder(found.session, found.located, presentation, epoch)
