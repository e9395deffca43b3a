"""Doubles for tests of migration: a layer over a script, and a layer over attempts that a test plays by hand."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import pytest

from services.core.call import Call
from services.core.errors import Failure, Reason
from services.core.generation.kept import Kept
from services.core.interface import Delta, Finish, Sink, TokenLogprobs
from services.core.model_card import ModelCard, Resume
from services.core.request import FinishReason, Request
from services.frontend.layers.migrate import Migrate, MigrateConfig
from tests.support.doubles import CARD, Collected, FakeSession, Script, Step, call_layer, make_request, run_async

ABLE = replace(CARD, resume=Resume(sampling=True, penalties=True, guided=True, logprobs=True))
DRAWING = replace(ABLE, resume=replace(ABLE.resume, sampling=False))
"""The card of an engine that draws without seeds."""


class RecordedMetrics:
    """Records what migrations report."""

    def __init__(self) -> None:
        self.moves: list[bool] = []
        self.from_prefix_count = 0
        self.recomputed: list[int] = []
        self.outcomes: list[str] = []
        self.gaps_s: list[float] = []
        self.exceeded = 0

    def count_move(self, model: str, *, has_tokens: bool, recomputed: int, is_exact: bool) -> None:
        self.moves.append(has_tokens)
        self.from_prefix_count += not is_exact
        self.recomputed.append(recomputed)

    def observe_move(self, model: str, *, has_tokens: bool, outcome: str, seconds: float) -> None:
        assert 0 <= seconds < 10
        self.outcomes.append(outcome)
        self.gaps_s.append(seconds)

    def count_exceeded(self, model: str) -> None:
        self.exceeded += 1


class RoutedScript(Script):
    """A script whose attempts go to worker-1, worker-2 and so on.

    `limits`: of moves, of the first workers; the others set none.
    """

    def __init__(self, *takes: Sequence[Step], limits: Sequence[int | None] = ()) -> None:
        super().__init__(*takes)
        self._limits = iter(limits)

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        call.attempt.session = FakeSession(f"worker-{len(self.calls) + 1}", next(self._limits, None))
        return await super().__call__(request, call, sink)


class Case:
    """A Migrate layer over a script, and the metrics that it reported."""

    def __init__(
        self, *takes: Sequence[Step], card: ModelCard = ABLE, limits: Sequence[int | None] = (), **config: Any
    ) -> None:
        """`limits`: see RoutedScript."""
        self.script = RoutedScript(*takes, limits=limits)
        self.metrics = RecordedMetrics()
        self.layer = Migrate(self.script, MigrateConfig(**config), self.metrics)
        self.card = card

    def run(self, request: Request | None = None, **call: Any) -> Collected:
        return run_async(call_layer(self.layer, request or make_request(), card=self.card, **call))

    def fails(self, request: Request | None = None, **call: Any) -> Failure:
        with pytest.raises(Failure) as caught:
            self.run(request, **call)
        return caught.value


class Stage:
    """A layer whose attempts a test plays by hand, in the order in which they start."""

    def __init__(self) -> None:
        self.attempts: list[StagedAttempt] = []
        self.entered = asyncio.Event()
        self.metrics = RecordedMetrics()
        self.has_workers = True

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        attempt = StagedAttempt(request, call, sink)
        if self.has_workers:
            call.attempt.session = FakeSession(f"worker-{len(self.attempts) + 1}")
        self.attempts.append(attempt)
        self.entered.set()
        try:
            return await attempt.ended
        except asyncio.CancelledError:
            attempt.is_cancelled = True
            raise

    async def attempt(self, index: int) -> "StagedAttempt":
        while len(self.attempts) <= index:
            self.entered.clear()
            await self.entered.wait()
        return self.attempts[index]


class StagedAttempt:
    """One attempt on a stage: delivers, leaves, finishes or fails when the test says so."""

    def __init__(self, request: Request, call: Call, sink: Sink) -> None:
        self.request = request
        self.call = call
        self._sink = sink
        self._position = len(request.generated_token_ids)
        self.ended: asyncio.Future[Finish] = asyncio.get_running_loop().create_future()
        self.is_cancelled = False

    def deliver(self, *token_ids: int) -> None:
        logprobs = None if self.request.logprobs is None else [TokenLogprobs(-float(token)) for token in token_ids]
        self._sink.deliver(Delta(self._position, token_ids, logprobs=logprobs))
        self._position += len(token_ids)

    def leave(self) -> None:
        self.call.attempt.on_leaving(30.0)

    def finish(self) -> None:
        self.ended.set_result(Finish(FinishReason.STOP))

    def fail(self, reason: Reason) -> None:
        self.ended.set_exception(Failure(reason, "as staged"))


Play = Callable[[Stage], Coroutine[Any, Any, None]]


def staged(
    play: Play,
    request: Request | None = None,
    *,
    card: ModelCard = ABLE,
    kept: Kept | None = None,
    **config: Any,
) -> tuple[Stage, Collected]:
    """Run a request on a stage. `play` must end it."""

    async def scenario() -> tuple[Stage, Collected]:
        stage = Stage()
        layer = Migrate(stage, MigrateConfig(**config), stage.metrics)
        async with asyncio.TaskGroup() as group:
            answer = group.create_task(call_layer(layer, request or make_request(), card=card, kept=kept))
            await play(stage)
        return stage, answer.result()

    return run_async(scenario())
