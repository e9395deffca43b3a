"""Planned moves: when a worker leaves, a second attempt takes over without a pause.

The source is the attempt on the worker that leaves; the target is the second attempt.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from services.core.call import Call
from services.core.errors import Reason
from services.core.interface import Delta, Finish, Sink
from services.core.model_card import ModelCard, Resume
from services.core.request import Continuation, FinishReason, Request, Sampling
from services.frontend.layers.migrate import Migrate, MigrateConfig
from services.frontend.migration import migration, move
from services.frontend.migration.policy import LAG_TOKENS_MAX, ROUNDS_MAX
from tests.frontend.migration.support import ABLE, DRAWING, RecordedMetrics, Stage, staged
from tests.support.doubles import HANG, Collected, FakeSession, Script, call_layer, make_request, run_async


def test_the_source_streams_until_the_target_delivers_the_next_token() -> None:
    async def play(stage: Stage) -> None:
        source = await stage.attempt(0)
        source.deliver(7)
        source.leave()
        target = await stage.attempt(1)
        assert target.request.generated_token_ids == (7,)
        assert target.call.excluded == {"worker-1"}
        assert not source.is_cancelled
        target.deliver(8)
        target.deliver(9)
        target.finish()

    stage, answer = staged(play)

    assert answer.token_ids == [7, 8, 9]
    assert stage.attempts[0].is_cancelled
    assert stage.metrics.moves == [True]


def test_a_target_within_the_lag_bound_takes_over_without_repeating_a_token() -> None:
    async def play(stage: Stage) -> None:
        source = await stage.attempt(0)
        source.leave()
        target = await stage.attempt(1)
        source.deliver(*range(LAG_TOKENS_MAX))
        target.deliver(*range(LAG_TOKENS_MAX + 2))
        source.deliver(99)  # Dropped: the target has taken over.
        target.finish()

    _, answer = staged(play, make_request(logprobs=0))

    assert answer.token_ids == [0, 1, 2]
    assert [one.logprob for delta in answer.deltas for one in delta.logprobs or ()] == [0.0, -1.0, -2.0]


def test_a_target_that_is_too_far_behind_starts_again_after_the_tokens_of_the_source() -> None:
    async def play(stage: Stage) -> None:
        source = await stage.attempt(0)
        source.leave()
        late = await stage.attempt(1)
        source.deliver(7, 8, 9)
        late.deliver(7)
        target = await stage.attempt(2)
        assert late.is_cancelled
        assert target.request.generated_token_ids == (7, 8, 9)
        target.deliver(10)
        target.finish()

    stage, answer = staged(play)

    assert answer.token_ids == [7, 8, 9, 10]
    assert stage.metrics.moves == [True]


def test_a_target_that_never_catches_up_takes_over_after_the_last_round() -> None:
    async def play(stage: Stage) -> None:
        source, spoken = await stage.attempt(0), 0
        source.leave()
        for round_ in range(1, ROUNDS_MAX + 2):
            target = await stage.attempt(round_)
            source.deliver(*range(spoken, spoken + 3))
            spoken += 3
            target.deliver(spoken - 3)
        assert source.is_cancelled is False
        target.deliver(spoken - 2, spoken - 1, spoken)
        target.finish()

    _, answer = staged(play)

    assert answer.token_ids == list(range(3 * (ROUNDS_MAX + 1) + 1))


def test_a_source_that_finishes_first_finishes_the_request() -> None:
    async def play(stage: Stage) -> None:
        source = await stage.attempt(0)
        source.leave()
        await stage.attempt(1)
        source.deliver(7)
        source.finish()

    stage, answer = staged(play)

    assert answer.token_ids == [7]
    assert stage.attempts[1].is_cancelled
    assert stage.metrics.moves == []


def test_a_source_that_is_lost_is_replaced_by_the_target() -> None:
    async def play(stage: Stage) -> None:
        source = await stage.attempt(0)
        source.deliver(7)
        source.leave()
        target = await stage.attempt(1)
        source.deliver(8)
        source.fail(Reason.DISCONNECTED)
        target.deliver(8, 9)
        target.finish()

    stage, answer = staged(play)

    assert answer.token_ids == [7, 8, 9]
    assert len(stage.attempts) == 2


def test_a_target_that_fails_is_replaced_by_another_while_the_source_goes_on() -> None:
    async def play(stage: Stage) -> None:
        source = await stage.attempt(0)
        source.leave()
        (await stage.attempt(1)).fail(Reason.WORKER_AT_CAPACITY)
        source.deliver(7)
        other = await stage.attempt(2)
        assert other.call.excluded == {"worker-1", "worker-2"}
        assert other.call.replacement_deadline == (await stage.attempt(1)).call.replacement_deadline
        other.deliver(8)
        other.finish()

    _, answer = staged(play)

    assert answer.token_ids == [7, 8]


def test_no_second_attempt_starts_for_a_worker_that_allows_no_moves() -> None:
    async def play(stage: Stage) -> None:
        source = await stage.attempt(0)
        source.call.attempt.session = FakeSession("strict", migration_limit=0)
        source.leave()
        source.deliver(7)
        source.finish()

    stage, answer = staged(play)

    assert answer.token_ids == [7]
    assert len(stage.attempts) == 1


def test_without_any_other_worker_the_source_goes_on_to_its_end() -> None:
    async def play(stage: Stage) -> None:
        source = await stage.attempt(0)
        source.leave()
        (await stage.attempt(1)).fail(Reason.NO_WORKERS)
        source.deliver(7)
        await asyncio.sleep(0)
        source.fail(Reason.DRAINING)
        last = await stage.attempt(2)
        last.deliver(8)
        last.finish()

    stage, answer = staged(play)

    assert answer.token_ids == [7, 8]
    assert len(stage.attempts) == 3


def test_failed_targets_are_replaced_rounds_max_times() -> None:
    async def play(stage: Stage) -> None:
        source = await stage.attempt(0)
        source.leave()
        for index in range(1, ROUNDS_MAX + 2):
            (await stage.attempt(index)).fail(Reason.STALLED)
            await asyncio.sleep(0)
        source.finish()

    stage, _ = staged(play)

    assert len(stage.attempts) == ROUNDS_MAX + 2


def test_after_the_loss_of_a_source_whose_target_waits_for_a_worker_the_wait_is_the_full_one() -> None:
    async def play(stage: Stage) -> None:
        source = await stage.attempt(0)
        source.deliver(7)
        stage.has_workers = False
        source.call.attempt.on_leaving(0.0)
        waiting = await stage.attempt(1)
        source.fail(Reason.ENGINE_DEAD)
        last = await stage.attempt(2)
        assert waiting.is_cancelled
        assert waiting.call.replacement_deadline is not None
        assert last.call.replacement_deadline is not None
        assert last.call.replacement_deadline > waiting.call.replacement_deadline + 5
        last.deliver(8)
        last.finish()

    _, answer = staged(play, replacement_wait_s=10)

    assert answer.token_ids == [7, 8]


def test_a_request_from_the_queue_of_a_worker_that_left_may_wait_for_room_elsewhere() -> None:
    """Bug: a drain under load refused such a request, although a kill did not. Both had been accepted."""

    async def play(stage: Stage) -> None:
        source = await stage.attempt(0)
        source.leave()
        for index in range(1, ROUNDS_MAX + 2):
            (await stage.attempt(index)).fail(Reason.WORKER_AT_CAPACITY)
            await asyncio.sleep(0)
        source.fail(Reason.DRAINING)
        last = await stage.attempt(ROUNDS_MAX + 2)
        assert last.call.replacement_deadline is not None
        assert last.call.excluded == {"worker-1"}
        last.deliver(7)
        last.finish()

    _, answer = staged(play)

    assert answer.token_ids == [7]


def test_a_target_whose_worker_leaves_is_replaced_once_it_has_taken_over() -> None:
    async def play(stage: Stage) -> None:
        source = await stage.attempt(0)
        source.leave()
        second = await stage.attempt(1)
        second.leave()
        second.deliver(7)
        third = await stage.attempt(2)
        third.deliver(8)
        third.finish()

    _, answer = staged(play)

    assert answer.token_ids == [7, 8]


def test_a_target_whose_worker_leaves_is_replaced_once_the_source_is_lost() -> None:
    async def play(stage: Stage) -> None:
        source = await stage.attempt(0)
        source.leave()
        second = await stage.attempt(1)
        second.leave()
        source.fail(Reason.DISCONNECTED)
        third = await stage.attempt(2)
        assert third.call.excluded == {"worker-1", "worker-2"}
        third.deliver(7)
        third.finish()

    _, answer = staged(play)

    assert answer.token_ids == [7]


def test_the_gap_of_a_planned_move_begins_with_the_last_token_of_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    for module in (migration, move):
        monkeypatch.setattr(module, "clock", lambda: now)

    async def play(stage: Stage) -> None:
        nonlocal now
        source = await stage.attempt(0)
        source.leave()
        target = await stage.attempt(1)
        now = 5.0
        source.deliver(7)
        now = 5.5
        target.deliver(7, 8)
        target.finish()

    stage, _ = staged(play)

    assert stage.metrics.gaps_s == [0.5]


def test_after_a_planned_move_the_next_wait_does_not_end_with_the_grace_of_the_first_worker() -> None:
    async def play(stage: Stage) -> None:
        source = await stage.attempt(0)
        source.leave()
        second = await stage.attempt(1)
        source.deliver(7)
        second.deliver(7)  # Takes over without a new token.
        second.fail(Reason.DRAINING)
        third = await stage.attempt(2)
        assert second.call.replacement_deadline is not None, "in 30 s, when the source's worker ends its streams"
        assert third.call.replacement_deadline is not None
        assert third.call.replacement_deadline < second.call.replacement_deadline - 10
        third.deliver(8)
        third.finish()

    _, answer = staged(play, replacement_wait_s=10)

    assert answer.token_ids == [7, 8]


def test_a_target_does_not_take_over_from_a_source_that_has_finished() -> None:
    async def play(stage: Stage) -> None:
        source = await stage.attempt(0)
        source.deliver(7)
        source.leave()
        second = await stage.attempt(1)
        source.finish()
        await asyncio.sleep(0)
        second.deliver(8)

    _, answer = staged(play)

    assert answer.token_ids == [7]


@pytest.mark.parametrize(
    ("card", "config"),
    [(replace(ABLE, resume=Resume(sampling=False)), {}), (ABLE, {"seq_len_max": 2})],
    ids=["the engine cannot", "they are not recorded"],
)
def test_a_target_is_given_up_if_the_tokens_that_the_source_has_delivered_cannot_be_resumed(
    card: ModelCard, config: dict[str, Any]
) -> None:
    async def play(stage: Stage) -> None:
        source = await stage.attempt(0)
        source.leave()
        second = await stage.attempt(1)
        source.deliver(7)
        second.deliver(50, 51)
        source.deliver(8)
        await asyncio.sleep(0)
        assert second.is_cancelled
        source.finish()

    _, answer = staged(play, make_request(sampling=Sampling(temperature=0.8, seed=1)), card=card, **config)

    assert answer.token_ids == [7, 8]


def test_a_worker_that_leaves_while_the_client_hangs_up_starts_no_attempt() -> None:
    """Bug: the callback raised in the session, which failed all its streams."""

    async def scenario() -> Stage:
        stage = Stage()
        layer = Migrate(stage, MigrateConfig(), stage.metrics)
        running = asyncio.ensure_future(call_layer(layer, make_request(), card=ABLE))
        source = await stage.attempt(0)
        running.cancel()
        for _ in range(5):
            source.leave()
            await asyncio.sleep(0)
        await asyncio.wait([running])
        return stage

    assert len(run_async(scenario()).attempts) <= 2


End = Callable[[Stage, "asyncio.Task[Collected]"], Coroutine[Any, Any, None]]


def ended(end: End) -> Stage:
    """Run a request on a stage until `end` has ended it, and check that it has left no task."""

    async def scenario() -> Stage:
        stage = Stage()
        layer = Migrate(stage, MigrateConfig(), stage.metrics)
        before = asyncio.all_tasks()
        await end(stage, asyncio.ensure_future(call_layer(layer, make_request(), card=ABLE)))
        assert asyncio.all_tasks() == before
        return stage

    return run_async(scenario())


@pytest.mark.parametrize("takes_over", [False, True], ids=["before it takes over", "after it has taken over"])
def test_a_bug_in_a_target_ends_the_request_and_is_not_taken_for_a_failure(takes_over: bool) -> None:
    async def end(stage: Stage, running: "asyncio.Task[Collected]") -> None:
        source = await stage.attempt(0)
        source.deliver(7)
        source.leave()
        target = await stage.attempt(1)
        if takes_over:
            target.deliver(8)
        target.ended.set_exception(ValueError("bug"))
        with pytest.raises(ValueError, match="bug"):
            await running

    assert ended(end).attempts[0].is_cancelled


def test_no_target_outlives_a_request_that_has_finished() -> None:
    async def end(stage: Stage, running: "asyncio.Task[Collected]") -> None:
        source = await stage.attempt(0)
        source.leave()
        await stage.attempt(1)
        source.finish()
        await running

    assert ended(end).attempts[1].is_cancelled


def test_neither_source_nor_target_outlives_a_client_that_hangs_up() -> None:
    async def end(stage: Stage, running: "asyncio.Task[Collected]") -> None:
        (await stage.attempt(0)).leave()
        await stage.attempt(1)
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()

    assert [attempt.is_cancelled for attempt in ended(end).attempts] == [True, True]


def test_a_target_that_finishes_without_a_token_ends_the_answer() -> None:
    async def play(stage: Stage) -> None:
        source = await stage.attempt(0)
        source.deliver(7)
        source.leave()
        (await stage.attempt(1)).finish()

    stage, answer = staged(play)

    assert answer.finish == Finish(FinishReason.STOP)
    assert stage.attempts[0].is_cancelled
    assert stage.metrics.outcomes == ["success"]


def test_a_target_that_leaves_after_it_has_taken_over_is_replaced_in_turn() -> None:
    async def play(stage: Stage) -> None:
        for index in range(3):
            attempt = await stage.attempt(index)
            attempt.deliver(index)
            attempt.leave()
        last = await stage.attempt(3)
        last.deliver(3)
        last.finish()

    stage, answer = staged(play)

    assert answer.token_ids == [0, 1, 2, 3]
    assert stage.metrics.moves == [True, True, True]


def test_with_a_limit_of_0_no_target_starts() -> None:
    async def play(stage: Stage) -> None:
        source = await stage.attempt(0)
        source.leave()
        source.deliver(7)
        source.finish()

    stage, _ = staged(play, limit=0)

    assert len(stage.attempts) == 1


def test_no_attempt_starts_and_no_token_is_delivered_after_the_client_has_hung_up() -> None:
    """Messages can arrive in the same turn of the loop, before the cancelled attempts have ended."""

    class Late(Script):
        async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
            try:
                return await super().__call__(request, call, sink)
            except asyncio.CancelledError:
                if call is self.calls[-1]:
                    call.attempt.on_leaving(30.0)
                    sink.deliver(Delta(0, [7]))
                raise

    async def scenario() -> None:
        script, collected = Late([HANG], [HANG]), Collected()
        layer = Migrate(script, MigrateConfig(), RecordedMetrics())
        call = Call(request_id="r", card=ABLE)
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(layer(make_request(), call, collected))
            await script.hanging.wait()
            script.hanging.clear()
            script.calls[0].attempt.on_leaving(30.0)
            await script.hanging.wait()
            asking.cancel()
        assert script.cancelled_count == 2
        assert collected.deltas == []
        assert len(script.requests) == 2

    run_async(scenario())


# Engines that draw without seeds: two attempts side by side draw different tokens

SAMPLED = make_request(sampling=Sampling(temperature=0.8))


def test_sampled_answer_of_an_engine_without_seeds_stays_until_its_worker_ends_it() -> None:
    async def play(stage: Stage) -> None:
        source = await stage.attempt(0)
        source.deliver(7)
        source.leave()
        source.deliver(8)
        assert len(stage.attempts) == 1
        source.fail(Reason.DRAINING)
        target = await stage.attempt(1)
        assert target.request.generated_token_ids == (7, 8)
        target.deliver(9)
        target.finish()

    stage, answer = staged(play, SAMPLED, card=DRAWING)

    assert answer.token_ids == [7, 8, 9]
    assert [delta.continuation for delta in answer.deltas] == [None, None, Continuation.PREFIX, None]
    assert stage.metrics.moves == [True]


def test_target_that_began_before_the_first_token_is_given_up_once_the_source_delivers() -> None:
    async def play(stage: Stage) -> None:
        source = await stage.attempt(0)
        source.leave()
        target = await stage.attempt(1)
        source.deliver(7)
        target.deliver(1, 2)  # Not after 7.
        source.deliver(8)
        source.finish()

    _, answer = staged(play, SAMPLED, card=DRAWING)

    assert answer.token_ids == [7, 8]


def test_target_that_began_before_the_first_token_does_not_replace_a_source_that_fails_later() -> None:
    async def play(stage: Stage) -> None:
        source = await stage.attempt(0)
        source.leave()
        target = await stage.attempt(1)
        source.deliver(7)
        source.fail(Reason.DISCONNECTED)
        third = await stage.attempt(2)
        target.deliver(1, 2)
        assert third.request.generated_token_ids == (7,)
        third.deliver(8)
        third.finish()

    _, answer = staged(play, SAMPLED, card=DRAWING)

    assert answer.token_ids == [7, 8]


def test_target_takes_over_before_the_first_token() -> None:
    async def play(stage: Stage) -> None:
        (await stage.attempt(0)).leave()
        target = await stage.attempt(1)
        target.deliver(1, 2)
        target.finish()

    _, answer = staged(play, SAMPLED, card=DRAWING)

    assert answer.token_ids == [1, 2]
    assert {delta.continuation for delta in answer.deltas} == {None}
