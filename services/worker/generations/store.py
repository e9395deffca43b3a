"""All generations of a worker: who may adopt them, and how long and how many of them wait without an owner."""

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from types import TracebackType

from services.core.call import Call, Cause
from services.core.common_layers import bug_failure
from services.core.errors import Failure, Reason
from services.core.flow.delta_buffer import size_of
from services.core.generation.kept import expired
from services.core.interface import Delta, Layer
from services.core.request import FinishReason, Request
from services.worker.generations.generation import Generation, Owner, taken_over

EXPIRED_KEPT = 65_536
"""How many ids of answers whose grace is over a worker remembers, so that a late resume is told that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DetachConfig:
    """Bounds of what waits without an owner.

    `grace_s_max`: how long. `records_max`: how many generations. `bytes_max`: of their records together.
    """

    grace_s_max: float = 300.0
    records_max: int = 4096
    bytes_max: int = 256 * 1024 * 1024


class _Nobody:
    """The owner of a generation that has been dropped, whose engine may still send a step of tokens."""

    id, outbox = 0, None

    def on_begun(self) -> None: ...

    def on_tokens(self, delta: Delta) -> None: ...

    def on_ended(self, outcome: FinishReason | Failure) -> None: ...


_NOBODY = _Nobody()


class GenerationStore:
    """The generations by id and index, and the owner of detached ones. As a context manager it owns all tasks.

    Ids are looked up by a keyed hash, so that the time of a lookup tells nothing about the ids that there are:
    whoever knows an id may read the answer.

    Beyond a bound the generation that has been detached the longest is dropped, those that have ended first: what is
    left of them costs no work.
    """

    id, outbox = 0, None  # As an owner, which is no stream.

    def __init__(self, pipeline: Layer, config: DetachConfig) -> None:
        self._pipeline = pipeline
        self._config = config
        self._group = asyncio.TaskGroup()
        self._secret = secrets.token_bytes(32)
        self._by_id: dict[bytes, dict[int, Generation]] = {}
        self._detached: OrderedDict[Generation, None] = OrderedDict()  # In the order in which they were let go.
        self._expired: OrderedDict[bytes, None] = OrderedDict()
        self.detached_bytes = 0
        self.running_count = 0

    async def __aenter__(self) -> "GenerationStore":
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for generation in [one for choices in self._by_id.values() for one in choices.values()]:
            self.drop(generation, Cause.DRAIN)
        await self._group.__aexit__(None, None, None)  # An error of the context's body is not wrapped.

    @property
    def detached_count(self) -> int:
        """How many generations have no frontend, whether they run or have ended."""
        return len(self._detached)

    @property
    def detached_running_count(self) -> int:
        """How many of them still run."""
        return sum(one.outcome is None for one in self._detached)

    # From sessions

    def start(self, generation: Generation, request: Request, call: Call) -> None:
        """Run a generation for its owner. A record with the same id and index is replaced.

        Raises TAKEN_OVER if that record has had a later owner.
        """
        key = self._key(generation.spec.id)
        former = self._by_id.get(key, {}).get(generation.index)
        if former is not None:
            if former.epoch > generation.epoch:
                _leave_group(generation)
                raise taken_over()
            self._take_away(former, Cause.REPLACED, taken_over())
        self._by_id.setdefault(key, {})[generation.index] = generation
        generation.task = self._group.create_task(self._run(generation, request, call))
        self.running_count += 1
        generation.task.add_done_callback(lambda _: self._on_done(generation))

    def _on_done(self, generation: Generation) -> None:
        self.running_count -= 1
        generation.task = None  # A record that waits needs no more memory than its tokens.
        _leave_group(generation)

    async def _run(self, generation: Generation, request: Request, call: Call) -> None:
        outcome: FinishReason | Failure
        try:
            outcome = (await self._pipeline(request, call, generation)).reason
        except Failure as failure:
            failure.clear_tracebacks()
            outcome = failure
        try:
            generation.end_with(outcome)
            if isinstance(generation.outcome, Failure) and generation not in self._detached:
                self.drop(generation, Cause.INTERNAL)  # It has ended. Its owner knows why.
        except Exception as error:  # A bug must not end the other generations.
            bug_failure(error, call.request_id)

    def locate(self, generation_id: bytes) -> Sequence[Generation]:
        """The generations of an answer, by index."""
        return [one for _, one in sorted(self._by_id.get(self._key(generation_id), {}).items())]

    def is_expired(self, generation_id: bytes) -> bool:
        """Whether generations of this answer were dropped because their grace was over."""
        return self._key(generation_id) in self._expired

    def adopt(self, generation_id: bytes, index: int, epoch: int, owner: Owner) -> Generation:
        """Give a generation a new owner.

        Raises STREAM_NOT_FOUND, STREAM_EXPIRED if its grace has ended since it was found, or TAKEN_OVER if it has had a
        later one.
        """
        generation = self._by_id.get(self._key(generation_id), {}).get(index)
        if generation is None:
            if self.is_expired(generation_id):
                raise expired()
            raise Failure(Reason.STREAM_NOT_FOUND, "the worker does not have this answer any more")
        generation.adopt(owner, epoch)
        self._remove_detached(generation)
        return generation

    def let_go(self, generation: Generation, owner: Owner) -> None:
        """A frontend needs it no more: wait for another one. Ignored if it has another one already."""
        if generation.owner is not owner:
            return
        generation.owner = self
        self._detached[generation] = None
        self.detached_bytes += generation.size
        grace_s = min(generation.spec.grace_s, self._config.grace_s_max)
        generation.timer = asyncio.get_running_loop().call_later(grace_s, self._expire, generation)
        self._trim()

    def drop(self, generation: Generation, cause: Cause) -> bool:
        """Cancel it, if it runs, and forget its record. Returns whether it ran."""
        self._remove_detached(generation)
        generation.stop_timer()
        generation.owner = _NOBODY
        key = self._key(generation.spec.id)
        choices = self._by_id.get(key, {})
        if choices.get(generation.index) is generation:
            del choices[generation.index]
            if not choices:
                del self._by_id[key]
        return generation.cancel(cause)

    def cancel(self, generation_id: bytes) -> int:
        """Drop the generations of an answer, whoever owns them: the owners are told. Returns how many of them ran."""
        return sum(self._take_away(one, Cause.EXPLICIT, _cancelled()) for one in self.locate(generation_id))

    def _take_away(self, generation: Generation, cause: Cause, failure: Failure) -> bool:
        """Drop a generation, and tell its owner why. Returns whether it ran."""
        owner = generation.owner
        was_running = self.drop(generation, cause)
        owner.on_ended(failure)
        return was_running

    # The owner of those that are detached

    def on_begun(self) -> None:
        """Ignored: no frontend waits for it."""

    def on_tokens(self, delta: Delta) -> None:
        self.detached_bytes += size_of(delta)
        self._trim()

    def on_ended(self, outcome: FinishReason | Failure) -> None:
        """The record has the outcome."""

    def _key(self, generation_id: bytes) -> bytes:
        return blake2b(generation_id, digest_size=16, key=self._secret).digest()

    # Bounds

    def _remove_detached(self, generation: Generation) -> None:
        if generation in self._detached:
            del self._detached[generation]
            self.detached_bytes -= generation.size

    def _expire(self, generation: Generation) -> None:
        self.drop(generation, Cause.GRACE_OVER)
        key = self._key(generation.spec.id)
        self._expired[key] = None
        self._expired.move_to_end(key)
        if len(self._expired) > EXPIRED_KEPT:
            self._expired.popitem(last=False)

    def _trim(self) -> None:
        """Drop what is detached beyond a bound."""
        config = self._config
        while len(self._detached) > config.records_max or self.detached_bytes > config.bytes_max:
            first = next((one for one in self._detached if one.outcome is not None), None)
            self._expire(first or next(iter(self._detached)))


def _cancelled() -> Failure:
    return Failure(Reason.CANCELLED, "the request was cancelled by the id of its answer")


def _leave_group(generation: Generation) -> None:
    """A choice that was refused, or whose task has ended, claims no place any more, whether it started or not."""
    if generation.choice_group is not None:
        generation.choice_group.leave(generation.choice)
