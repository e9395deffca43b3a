"""Migrate: builds the migration of each request and bounds what is recorded."""

import asyncio
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from services.core.call import Call
from services.core.errors import Reason
from services.core.generation.kept import Kept
from services.core.interface import Finish, Sink
from services.core.request import Continuation, FinishReason, Request, Sampling
from services.frontend.layers.migrate import Migrate, MigrateConfig
from tests.frontend.migration.support import ABLE, DRAWING, Case, RecordedMetrics, Stage, staged
from tests.support.doubles import HANG, Collected, Script, call_layer, make_kept, make_request, run_async


def test_an_answer_without_a_failure_passes_through_unchanged() -> None:
    case = Case([7, 8, FinishReason.STOP])

    result = case.run()

    assert result.token_ids == [7, 8]
    assert result.finish == Finish(FinishReason.STOP)
    assert case.metrics.moves == []


@pytest.mark.parametrize(("seq_len_max", "moves"), [(4, True), (3, False)])
def test_a_request_moves_up_to_seq_len_max_tokens_and_not_above(seq_len_max: int, moves: bool) -> None:
    case = Case([7, 8, Reason.DISCONNECTED], [9], seq_len_max=seq_len_max)
    request = make_request(prompt=(1, 2))

    if moves:
        assert case.run(request).token_ids == [7, 8, 9]
    else:
        assert case.fails(request).reason is Reason.DISCONNECTED
    assert case.metrics.exceeded == 1  # The last token exceeds the limit in either case.


def test_a_prompt_above_seq_len_max_is_never_recorded_and_its_answer_does_not_move() -> None:
    begun = Case([7, Reason.DISCONNECTED], [8], seq_len_max=1)
    new = Case([Reason.DISCONNECTED], [7], seq_len_max=1)

    assert begun.fails(make_request(prompt=(1, 2))).reason is Reason.DISCONNECTED
    assert begun.metrics.exceeded == 1
    assert new.run(make_request(prompt=(1, 2))).token_ids == [7]  # Without tokens there is nothing to record.


def test_a_request_without_a_failure_starts_no_task() -> None:
    async def scenario() -> set[asyncio.Task[Any]]:
        script = Script([HANG])
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(call_layer(Migrate(script, MigrateConfig(), RecordedMetrics()), make_request()))
            await script.hanging.wait()
            others = asyncio.all_tasks() - {asking}
            asking.cancel()
        return others

    assert len(run_async(scenario())) == 1, "the only other task is the test's"


@pytest.fixture
def _no_garbage_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_garbage_collection")
def test_a_request_without_a_failure_leaves_no_reference_cycle() -> None:
    """A cycle would keep the request's objects until the next garbage collection."""

    async def scenario() -> weakref.ref[Collected]:
        collected = Collected()
        layer = Migrate(Forgetful([7, 8]), MigrateConfig(), RecordedMetrics())
        await layer(make_request(), Call(request_id="r", card=ABLE), collected)
        return weakref.ref(collected)

    assert run_async(scenario())() is None


@pytest.mark.usefixtures("_no_garbage_collection")
def test_a_planned_move_leaves_no_reference_cycle() -> None:
    async def scenario() -> weakref.ref[Collected]:
        collected, stage = Collected(), Stage()
        layer = Migrate(stage, MigrateConfig(), stage.metrics)
        running = asyncio.ensure_future(layer(make_request(), Call(request_id="r", card=ABLE), collected))
        source = await stage.attempt(0)
        source.leave()
        target = await stage.attempt(1)
        target.deliver(7)
        target.finish()
        await running
        stage.attempts.clear()
        return weakref.ref(collected)

    assert run_async(scenario())() is None


class Forgetful(Script):
    """Keeps no reference to its calls."""

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        try:
            return await super().__call__(request, call, sink)
        finally:
            self.calls.clear()


# Answers that are kept


def kept_of(call: Call) -> Kept:
    assert call.kept is not None
    return call.kept


@pytest.mark.parametrize("generated", [(), (5, 6)])
def test_record_of_each_attempt_begins_after_the_tokens_that_the_client_brought(generated: tuple[int, ...]) -> None:
    case = Case([7, 8, Reason.DISCONNECTED], [9])

    case.run(make_request(generated_token_ids=generated), kept=make_kept())

    assert [kept_of(call).base for call in case.script.calls] == [len(generated)] * 2
    assert case.script.requests[1].generated_token_ids == (*generated, 7, 8)


def test_resumed_answer_that_had_moved_says_what_it_has_lost() -> None:
    case, kept = Case([7]), make_kept()
    kept.generation.continuations = {0: Continuation.PREFIX}

    answer = case.run(kept=kept)

    assert [(one.token_ids, one.continuation) for one in answer.deltas] == [((), Continuation.PREFIX), ([7], None)]


def test_what_a_kept_answer_loses_by_moving_is_known_to_the_next_worker() -> None:
    case, kept = Case([7, Reason.DISCONNECTED], [8], card=DRAWING), make_kept()

    case.run(make_request(sampling=Sampling(temperature=0.8)), kept=kept)

    assert kept.generation.continuations == {0: Continuation.PREFIX}


def test_next_worker_gets_the_log_probabilities_of_the_tokens_before() -> None:
    async def play(stage: Stage) -> None:
        source = await stage.attempt(0)
        source.deliver(7, 8)
        source.fail(Reason.DISCONNECTED)
        target = await stage.attempt(1)
        assert [one.logprob for one in kept_of(target.call).prior_logprobs] == [-7.0, -8.0]
        target.finish()

    staged(play, make_request(logprobs=0), kept=make_kept())


def test_second_attempt_gets_as_many_log_probabilities_as_tokens() -> None:
    """A bug: the first attempt went on before the second one was sent, and the worker kept them side by side."""

    async def play(stage: Stage) -> None:
        source = await stage.attempt(0)
        source.deliver(7)
        source.leave()
        source.deliver(8)
        target = await stage.attempt(1)
        assert target.request.generated_token_ids == (7,)
        assert [one.logprob for one in kept_of(target.call).prior_logprobs] == [-7.0]
        target.deliver(8, 9)
        target.finish()

    staged(play, make_request(logprobs=0), kept=make_kept())


def test_attempt_is_needed_until_another_one_has_taken_its_place() -> None:
    async def play(stage: Stage) -> None:
        source = await stage.attempt(0)
        source.deliver(7)
        source.leave()
        target = await stage.attempt(1)
        assert (source.call.attempt.is_needed, target.call.attempt.is_needed) == (True, False)
        target.deliver(8)
        assert (source.call.attempt.is_needed, target.call.attempt.is_needed) == (False, True)
        target.finish()

    staged(play, kept=make_kept())


@pytest.mark.parametrize(
    ("reason", "has_failed"), [(Reason.ENGINE_ERROR, True), (Reason.STREAM_NOT_FOUND, True), (Reason.TAKEN_OVER, False)]
)
def test_failure_ends_the_other_choices_unless_a_later_resume_needs_them(reason: Reason, has_failed: bool) -> None:
    case, kept = Case([7, reason], limit=0), make_kept()

    assert case.fails(kept=kept).reason is reason

    assert kept.generation.has_failed is has_failed


def test_choice_that_is_cancelled_has_not_failed() -> None:
    kept = make_kept()

    async def scenario() -> None:
        script = Script([7, HANG])
        layer = Migrate(script, MigrateConfig(), RecordedMetrics())
        running = asyncio.ensure_future(call_layer(layer, make_request(), kept=kept))
        await script.hanging.wait()
        running.cancel()
        await asyncio.wait([running])

    run_async(scenario())

    assert not kept.generation.has_failed


def test_answer_is_known_to_have_begun_when_the_engine_of_an_attempt_has() -> None:
    kept, begun = make_kept(), list[bool]()
    kept.generation.on_begun = lambda: begun.append(True)

    Case([7]).run(kept=kept)

    assert begun == [True]


@pytest.mark.parametrize(
    ("takes", "expected"),
    [
        ([[7]], ["attempt 0", "dropped 0"]),
        ([[Reason.DISCONNECTED], [7]], ["attempt 0", "attempt 1", "dropped 0", "dropped 1"]),
        ([[7, Reason.DISCONNECTED], [8]], ["attempt 0", "dropped 0", "attempt 1", "dropped 1"]),
    ],
)
def test_other_records_are_dropped_once_tokens_have_come_after_each_move(takes: Any, expected: list[str]) -> None:
    """Not when an engine has begun: the worker may be lost before it sends what it has."""
    kept, events = make_kept(first_index=4), list[str]()

    class Left(Script):
        async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
            number = len(self.calls)
            events.append(f"attempt {number}")
            kept.generation.leave(4, str(number), lambda: events.append(f"dropped {number}"))
            return await super().__call__(request, call, sink)

    run_async(call_layer(Migrate(Left(*takes), MigrateConfig(), RecordedMetrics()), make_request(), kept=kept))

    assert events == expected
