"""A lost worker costs the client nothing but time: the request goes on elsewhere after the last token delivered."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from services.card import Resume
from services.errors import Failure, Reason
from services.request import Call, Delta, Finish, FinishReason, Layer, Request, Sink

log = structlog.get_logger()

FREE_MOVES_MAX = 64
"""Refusals are free, but not for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrateConfig:
    """limit: moves per request, 0 for none. seq_len_max: prompt and generated tokens above which a request is not
    tracked, and so not moved, any more. replacement_wait_s: how long a request that lost its worker waits for another.
    """

    limit: int = 3
    seq_len_max: int | None = None
    replacement_wait_s: float = 10.0


class Recorder:
    """Remembers what the client has, so that another worker can go on after it."""

    def __init__(self, sink: Sink, request: Request, seq_len_max: int | None) -> None:
        self._sink = sink
        self._begin = len(request.generated_token_ids)
        room = None if seq_len_max is None else seq_len_max - len(request.prompt_token_ids) - self._begin
        self._tracked_max = room
        self.is_tracking = room is None or room >= 0
        self.count = 0
        self.token_ids: list[int] = []

    def deliver(self, delta: Delta) -> None:
        assert delta.position == self._begin + self.count, f"position {delta.position} after {self.count} tokens"
        self.count += len(delta.token_ids)
        if self.is_tracking:
            self.token_ids += delta.token_ids
            if self._tracked_max is not None and self.count > self._tracked_max:
                self.is_tracking = False
                self.token_ids = []
        self._sink.deliver(delta)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a request has come: moves that count, moves that were free, tokens delivered, whether they are known."""

    moves: int
    free_moves: int
    delivered: int
    is_tracked: bool


def may_migrate(failure: Failure, progress: Progress, config: MigrateConfig, *, can_resume: bool) -> bool:
    """Whether the request may go on elsewhere after this failure. Pure policy; `Migrate` is the mechanism."""
    if not progress.is_tracked or (progress.delivered and not can_resume):
        return False
    if failure.reason is Reason.ENGINE_ERROR:  # It may be the request's own fault: once, and only from the start.
        return config.limit > 0 and progress.moves == 0 and not progress.delivered
    if not failure.traits.migrates:
        return False
    if failure.traits.free:
        return progress.free_moves < FREE_MOVES_MAX
    return progress.moves < config.limit


def can_resume(request: Request, resume: Resume) -> bool:
    """Whether an engine that resumes like this carries on the request exactly."""
    return (resume.sampling or request.sampling.is_greedy) and (resume.penalties or not request.sampling.has_penalties)


class Migrate:
    """Above route: each attempt may choose anew.

    What the client gets when it gives up is the failure that cost it its worker, not what became of the last try.
    """

    def __init__(
        self,
        inner: Layer,
        config: MigrateConfig,
        resume_of: Callable[[str], Resume],
        on_move: Callable[[Request, bool], None],
    ) -> None:
        """resume_of: by model name. on_move: called with the request and whether it had delivered tokens."""
        self._inner = inner
        self._config = config
        self._resume_of = resume_of
        self._on_move = on_move

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        record = Recorder(sink, request, self._config.seq_len_max)
        moves = free_moves = 0
        cause: Failure | None = None
        while True:
            try:
                return await self._inner(request.after(record.token_ids), call, record)
            except Failure as failure:
                if len(request.generated_token_ids) + record.count >= request.max_tokens:
                    return Finish(FinishReason.LENGTH)  # All that was asked has been delivered.
                progress = Progress(moves, free_moves, record.count, record.is_tracking)
                resumable = can_resume(request, self._resume_of(request.model))
                if not may_migrate(failure, progress, self._config, can_resume=resumable):
                    raise cause or failure from failure
                if failure.traits.free:
                    free_moves += 1
                else:
                    moves += 1
                    cause = cause or failure
                call = self._next_attempt(request, call, failure, record)

    def _next_attempt(self, request: Request, call: Call, failure: Failure, record: Recorder) -> Call:
        self._on_move(request, record.count > 0)
        log.info(
            "request moves",
            request_id=call.request_id,
            away_from=failure.worker,
            reason=failure.reason,
            position=record.count,
            why=failure.detail,
        )
        excluded = call.excluded if failure.worker is None else call.excluded | {failure.worker}
        if failure.traits.free and not record.count:
            return replace(call, excluded=excluded)
        until = asyncio.get_running_loop().time() + self._config.replacement_wait_s
        if failure.reason is Reason.WORKER_AT_CAPACITY:  # It may have a slot later, and this answer has begun.
            excluded = call.excluded
        return replace(call, excluded=excluded, replacement_deadline=until)
