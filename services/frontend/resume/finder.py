"""Finds an answer on the workers: asks all of them, and chooses for each choice the one that is furthest."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.core.errors import Failure, Reason
from services.core.generation.kept import EPOCH_BITS, Generation
from services.core.generation.presentation import Presentation, decode_presentation
from services.frontend.routing.rejection import no_workers
from services.frontend.session.session import WorkerSession
from services.stubs import worker_pb2

LOCATE_S_MAX = 2.0
"""How long a worker may take to say what it has, and a frontend to reach the workers that discovery names."""


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


class GenerationFinder:
    """Answers where generations are, from the workers themselves: no frontend remembers any."""

    def __init__(self, sessions: Sessions, rng: random.Random) -> None:
        self._sessions = sessions
        self._rng = rng

    async def find(self, generation_id: bytes) -> tuple[Presentation, Generation]:
        """The answer's presentation, and its generation with an adoption for each choice that a worker has.

        Raises STREAM_NOT_FOUND, STREAM_EXPIRED, or NO_WORKERS if a worker that may have it cannot be asked.
        """
        founds, is_complete = await self._ask_all(generation_id)
        if not any(found.located.holdings for found in founds):
            await self._wait_for_sessions()
            founds, is_complete = await self._ask_all(generation_id)
        # In the same order on all frontends: of two resumes at once, neither discards what the other one takes.
        founds = sorted(founds, key=lambda found: found.session.record.instance_id)
        holders = [found for found in founds if found.located.holdings]
        if holders:
            return self._resumed(generation_id, holders)
        if any(found.located.is_expired for found in founds):
            raise Failure(Reason.STREAM_EXPIRED, "nobody came back for this answer in time, and it was ended")
        if not (is_complete and self._sessions.has_all):
            raise no_workers("a worker that may have this answer is not known yet, or cannot be reached at the moment")
        raise Failure(Reason.STREAM_NOT_FOUND, "no worker has an answer with this id")

    async def cancel(self, generation_id: bytes) -> bool:
        """Cancel all choices, whichever frontends own them, and drop their records. Returns whether any of them ran."""
        await self._wait_for_sessions()
        founds, _ = await self._ask_all(generation_id, cancels=True)
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
        founds: list[_Found] = []

        async def ask(session: WorkerSession) -> None:
            located = await session.generations.locate(generation_id, cancels=cancels)
            if located is not None:
                founds.append(_Found(session, located))

        try:
            async with asyncio.timeout(LOCATE_S_MAX), asyncio.TaskGroup() as group:
                for session in sessions:
                    group.create_task(ask(session))
        except TimeoutError:
            pass  # What has been found may be enough.
        return founds, len(founds) == len(sessions)

    def _resumed(self, generation_id: bytes, holders: Sequence[_Found]) -> tuple[Presentation, Generation]:
        presentation = decode_presentation(holders[0].located.presentation)
        generation = Generation(generation_id, presentation.grace_s, is_told=True)
        generation.presentation = holders[0].located.presentation
        generation.is_resumed = True
        epochs = [holding.epoch for found in holders for holding in found.located.holdings]
        generation.epoch = ((max(epochs) >> EPOCH_BITS) + 1 << EPOCH_BITS) + self._rng.getrandbits(EPOCH_BITS)
        best: dict[int, tuple[tuple[bool, bool, int], WorkerSession]] = {}
        for found in holders:
            for holding in found.located.holdings:
                rank = (not holding.has_failed, holding.is_finished, holding.token_count)
                known = best.get(holding.index)
                loser: WorkerSession | None = found.session
                if known is None or rank > known[0]:
                    best[holding.index] = (rank, found.session)
                    loser = None if known is None else known[1]
                if loser is not None:
                    loser.generations.discard(generation_id, holding.index, generation.epoch)
        generation.adoptions = {index: session.key for index, (_, session) in best.items()}
        return presentation, generation
