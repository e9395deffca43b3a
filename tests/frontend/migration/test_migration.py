"""Migration: a lost worker costs the client nothing but time, and a refusal not even a move."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from services.core.call import Call
from services.core.errors import Failure, Reason
from services.core.interface import Finish, Sink
from services.core.model_card import ModelCard, Resume
from services.core.request import Continuation, FinishReason, Request, Sampling
from services.frontend.layers.migrate import Migrate, MigrateConfig
from services.frontend.migration.policy import FREE_MOVES_MAX
from tests.frontend.migration.support import ABLE, DRAWING, Case, RecordedMetrics
from tests.support.doubles import Collected, FakeSession, Step, call_layer, make_request, run_async


def test_another_worker_continues_after_the_last_token_delivered() -> None:
    case = Case([7, 8, Reason.DISCONNECTED], [9, 10])

    result = case.run(make_request(prompt=(1, 2), max_tokens=4))

    assert result.token_ids == [7, 8, 9, 10]
    assert case.script.requests[1].generated_token_ids == (7, 8)
    assert case.script.requests[1].max_tokens == 4
    assert case.script.requests[1].prompt_token_ids == (1, 2)


def test_generated_tokens_of_the_request_stay_in_front_of_the_delivered_ones() -> None:
    case = Case([8, Reason.DISCONNECTED], [9])

    case.run(make_request(generated_token_ids=(5, 6)))

    assert case.script.requests[1].generated_token_ids == (5, 6, 8)


def test_each_failed_worker_is_excluded_and_the_next_attempt_may_wait_for_another() -> None:
    calls: list[Call] = []

    async def failing(request: Request, call: Call, sink: Sink) -> Finish:
        calls.append(call)
        call.attempt.session = FakeSession(f"worker-{len(calls)}")
        raise Failure(Reason.STALLED, "gone")

    layer = Migrate(failing, MigrateConfig(limit=2), RecordedMetrics())
    with pytest.raises(Failure):
        run_async(call_layer(layer, make_request()))

    assert [call.excluded for call in calls] == [set(), {"worker-1"}, {"worker-1", "worker-2"}]
    assert [call.replacement_deadline is not None for call in calls] == [False, True, True]


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_a_request_moves_at_most_limit_times(limit: int) -> None:
    takes: list[list[Step]] = [[7, Reason.DISCONNECTED] for _ in range(limit + 1)]
    case = Case(*takes, limit=limit)

    assert case.fails().reason is Reason.DISCONNECTED
    assert len(case.script.requests) == limit + 1
    assert len(case.metrics.moves) == limit


def test_the_client_may_lower_the_limit() -> None:
    assert Case([7, Reason.STALLED], [8]).fails(migration_limit=0).reason is Reason.STALLED


@pytest.mark.parametrize(
    ("limits", "moves"), [((0, None), 0), ((None, 0), 1), ((None, 1), 1), ((None, 2, 2), 2), ((3, 5, 1, 9), 2)]
)
def test_each_loss_counts_against_the_limit_of_the_worker_that_was_lost(
    limits: tuple[int | None, ...], moves: int
) -> None:
    takes: list[list[Step]] = [[7, Reason.DISCONNECTED] for _ in range(5)]
    case = Case(*takes, limits=limits, limit=4)

    assert case.fails().reason is Reason.DISCONNECTED
    assert len(case.metrics.moves) == moves


def test_the_client_gets_the_failure_of_the_lost_worker_followed_by_that_of_the_last_attempt() -> None:
    case = Case([7, Reason.STALLED], [Reason.CANNOT_CONNECT], [Reason.NO_WORKERS])

    failure = case.fails()

    assert failure.reason is Reason.STALLED
    assert failure.detail == "STALLED as scripted; and then: NO_WORKERS as scripted"


def test_after_a_refusal_for_capacity_other_workers_are_tried_at_once_and_at_no_cost() -> None:
    refusals: list[list[Step]] = [[Reason.WORKER_AT_CAPACITY] for _ in range(5)]
    case = Case(*refusals, [7], limit=1)

    assert case.run().token_ids == [7]
    assert {call.replacement_deadline for call in case.script.calls} == {None}


def test_a_request_that_every_worker_refused_fails_with_at_capacity() -> None:
    """Although the last attempt, with every worker excluded, found NO_WORKERS."""
    assert Case([Reason.WORKER_AT_CAPACITY], [Reason.NO_WORKERS]).fails().reason is Reason.WORKER_AT_CAPACITY


def refused(cause: str, reason: Reason = Reason.WORKER_AT_CAPACITY) -> Failure:
    return Failure(reason, f"full of {cause}", metadata={"cause": cause})


CROWDED = refused("capacity", Reason.OVERLOADED)
BUSY = refused("busy_threshold", Reason.OVERLOADED)


@pytest.mark.parametrize(
    ("refusals", "expected"),
    [
        ([refused("queue_tokens"), Failure(Reason.NO_WORKERS, "none left")], "queue_tokens"),
        ([refused("queue_tokens"), CROWDED], "queue_tokens"),
        ([refused("queue_tokens"), refused("capacity"), CROWDED], "queue_tokens"),
        ([refused("capacity"), refused("queue_timeout"), CROWDED], "queue_timeout"),
        ([refused("capacity"), refused("tenant_share"), CROWDED], "tenant_share"),
        ([refused("capacity"), CROWDED], "capacity"),
        ([refused("queue_tokens"), BUSY], "busy_threshold"),
    ],
)
def test_a_bound_that_only_the_worker_knows_is_reported_before_the_general_capacity(
    refusals: list[Failure], expected: str
) -> None:
    """Bug: the refusal named the capacity, although the worker had no room for the tokens."""
    failure = Case(*([one] for one in refusals)).fails()

    assert (failure.detail, failure.metadata) == (f"full of {expected}", {"cause": expected})


def test_an_earlier_refusal_does_not_hide_another_failure() -> None:
    assert Case([refused("queue_tokens")], [Reason.INVALID_ARGUMENT]).fails().reason is Reason.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "reason", [Reason.GRAMMAR_REPLAY_MISMATCH, Reason.DEADLINE_EXCEEDED, Reason.INVALID_ARGUMENT, Reason.INTERNAL]
)
def test_a_failure_that_no_other_worker_could_avoid_is_reported_as_it_is_after_a_loss(reason: Reason) -> None:
    assert Case([7, Reason.DISCONNECTED], [reason]).fails().reason is reason


def test_refusals_after_a_loss_neither_prolong_the_wait_nor_use_up_the_free_moves() -> None:
    refusals: list[list[Step]] = [[Reason.WORKER_AT_CAPACITY] for _ in range(FREE_MOVES_MAX + 5)]
    case = Case([7, Reason.DISCONNECTED], *refusals, [8])

    assert case.run().token_ids == [7, 8]
    assert len({call.replacement_deadline for call in case.script.calls[1:]}) == 1


@pytest.mark.parametrize("reason", [Reason.DISCONNECTED, Reason.DRAINING])
def test_after_a_token_the_next_loss_has_a_new_wait(reason: Reason) -> None:
    case = Case([7, Reason.DISCONNECTED], [8, reason], [9])

    case.run()

    first, second = (call.replacement_deadline for call in case.script.calls[1:])
    assert first is not None
    assert second is not None
    assert second > first


def test_a_request_that_no_engine_had_begun_is_not_poison() -> None:
    async def dying(request: Request, call: Call, sink: Sink) -> Finish:
        calls.append(call)
        raise Failure(Reason.DISCONNECTED, "gone while the request was in the queue")

    calls: list[Call] = []
    with pytest.raises(Failure) as caught:
        run_async(call_layer(Migrate(dying, MigrateConfig(), RecordedMetrics()), make_request(), card=ABLE))

    assert caught.value.reason is Reason.DISCONNECTED
    assert len(calls) == 4


def test_after_an_engine_error_another_worker_is_tried_without_waiting() -> None:
    """The worker is not lost, so no replacement is awaited."""
    case = Case([Reason.ENGINE_ERROR], [Reason.NO_WORKERS])

    assert case.fails().reason is Reason.ENGINE_ERROR
    assert case.script.calls[1].replacement_deadline is None


def test_a_refusal_is_not_counted_as_a_move() -> None:
    case = Case([Reason.WORKER_AT_CAPACITY], [Reason.DRAINING], [7])

    case.run()

    assert case.metrics.moves == []


def test_a_request_that_lost_its_worker_does_not_exclude_a_full_one() -> None:
    case = Case([Reason.STALLED], [Reason.WORKER_AT_CAPACITY], [7])

    case.run()

    assert [call.excluded for call in case.script.calls] == [set(), {"worker-1"}, {"worker-1"}]


def test_an_answer_with_tokens_that_is_refused_waits_for_a_slot() -> None:
    case = Case([7, Reason.DISCONNECTED], [Reason.WORKER_AT_CAPACITY], [8])

    assert case.run().token_ids == [7, 8]
    assert [call.replacement_deadline is None for call in case.script.calls] == [True, False, False]


def test_a_complete_answer_finishes_with_length_although_its_worker_is_lost() -> None:
    case = Case([7, 8, Reason.DISCONNECTED])

    result = case.run(make_request(max_tokens=2))

    assert result.finish == Finish(FinishReason.LENGTH)
    assert case.metrics.moves == []


def test_a_request_that_kills_two_workers_is_poison_and_no_third_is_tried() -> None:
    case = Case([Reason.DISCONNECTED], [Reason.ENGINE_DEAD], [7])

    assert case.fails().reason is Reason.POISON_REQUEST
    assert len(case.script.requests) == 2


def test_a_refusal_between_two_deaths_does_not_reset_their_count() -> None:
    case = Case([Reason.DISCONNECTED], [Reason.WORKER_AT_CAPACITY], [Reason.DISCONNECTED], [7])

    assert case.fails().reason is Reason.POISON_REQUEST


def test_a_request_that_runs_beside_a_poison_request_is_not_poison() -> None:
    """It has tokens from the first worker that died, and came to the second together with the poison request."""
    case = Case([7, Reason.DISCONNECTED], [Reason.DISCONNECTED], [8])

    assert case.run().token_ids == [7, 8]


def test_a_request_that_kills_workers_in_the_middle_of_its_answer_stops_after_three() -> None:
    case = Case([7, Reason.DISCONNECTED], [Reason.DISCONNECTED], [Reason.DISCONNECTED], [8])

    assert case.fails().reason is Reason.POISON_REQUEST
    assert len(case.script.requests) == 3


def test_a_stalled_worker_does_not_count_as_killed() -> None:
    assert Case([Reason.STALLED], [Reason.DISCONNECTED], [7]).run().token_ids == [7]


def test_two_deaths_with_tokens_between_them_are_not_poison() -> None:
    case = Case([7, Reason.DISCONNECTED], [8, Reason.DISCONNECTED], [9])

    assert case.run().token_ids == [7, 8, 9]


def test_only_moves_are_counted_with_new_and_ongoing_requests_apart() -> None:
    case = Case([Reason.STALLED], [7, Reason.DISCONNECTED], [8])
    off = Case([7, Reason.DISCONNECTED], limit=0)

    case.run(make_request(prompt=(1, 2)))
    off.fails()

    assert case.metrics.moves == [False, True]
    assert case.metrics.recomputed == [2, 3]
    assert case.metrics.outcomes == ["success", "success"]
    assert off.metrics.moves == []


def test_a_move_without_a_further_token_is_reported_as_a_failure() -> None:
    case = Case([7, Reason.STALLED], [Reason.NO_WORKERS])

    case.fails()

    assert case.metrics.outcomes == ["failure"]


def test_each_of_several_moves_without_a_token_between_is_reported() -> None:
    case = Case([7, Reason.STALLED], [Reason.STALLED], [8])

    case.run()

    assert case.metrics.outcomes == ["failure", "success"]


def test_an_answer_that_the_engine_cannot_resume_exactly_does_not_move() -> None:
    sampled = make_request(sampling=Sampling(temperature=0.8, seed=1))
    unable = replace(ABLE, resume=Resume(sampling=False))
    take: list[Step] = [7, Reason.DISCONNECTED]

    assert Case(take, [8], card=unable).run().token_ids == [7, 8]
    assert Case(take, [8], card=unable).fails(sampled).reason is Reason.DISCONNECTED
    assert Case([Reason.DISCONNECTED], [8], card=unable).run(sampled).token_ids == [8]


@pytest.mark.parametrize("raised", [Reason.OVERLOADED, Reason.INVALID_ARGUMENT, Reason.DEADLINE_EXCEEDED])
def test_a_failure_that_would_repeat_elsewhere_causes_no_move(raised: Reason) -> None:
    case = Case([7, raised])

    assert case.fails().reason is raised
    assert case.metrics.moves == []


def test_a_bug_in_a_lower_layer_is_not_taken_for_a_failure() -> None:
    with pytest.raises(ValueError, match="bug"):
        Case([7, ValueError("bug")]).run()


def test_no_attempt_outlives_a_client_that_hangs_up() -> None:
    async def scenario() -> Case:
        case = Case([7, Reason.DISCONNECTED], ["hang"])
        async with asyncio.TaskGroup() as group:
            task = group.create_task(call_layer(case.layer, make_request()))
            await case.script.hanging.wait()
            task.cancel()
        return case

    case = run_async(scenario())
    assert case.script.cancelled_count == 1
    assert case.metrics.outcomes == ["cancelled"]


# Engines that draw without seeds

SAMPLED = Sampling(temperature=0.8)


def continuations(answer: Collected) -> list[tuple[int, Continuation | None]]:
    """Where and how the layer above is told that the answer continues."""
    return [(delta.position, delta.continuation) for delta in answer.deltas if not delta.token_ids]


def test_sampled_answer_of_an_engine_without_seeds_continues_after_the_delivered_tokens_and_says_so() -> None:
    case = Case([7, 8, Reason.DISCONNECTED], [9, 10], card=DRAWING)

    answer = case.run(make_request(sampling=SAMPLED))

    assert answer.token_ids == [7, 8, 9, 10]
    assert case.script.requests[1].generated_token_ids == (7, 8)
    assert continuations(answer) == [(2, Continuation.PREFIX)]
    assert (case.metrics.moves, case.metrics.from_prefix_count) == ([True], 1)


@pytest.mark.parametrize(
    ("takes", "card", "sampling"),
    [
        (([7, Reason.DISCONNECTED], [9]), DRAWING, Sampling(temperature=0.0)),
        (([7, Reason.DISCONNECTED], [9]), ABLE, Sampling(temperature=0.8, seed=1)),
        (([Reason.DISCONNECTED], [9]), DRAWING, SAMPLED),
        (([7, 8],), DRAWING, SAMPLED),
    ],
    ids=["greedy", "by a seed", "before the first token", "without a move"],
)
def test_answer_that_lost_nothing_says_nothing(takes: Any, card: ModelCard, sampling: Sampling) -> None:
    case = Case(*takes, card=card)

    assert continuations(case.run(make_request(sampling=sampling))) == []
    assert case.metrics.from_prefix_count == 0


@pytest.mark.parametrize(
    ("sampling", "config"),
    [(Sampling(temperature=0.8, seed=1), {}), (SAMPLED, {"resume_sampling": "exact"})],
    ids=["the client's seed", "--resume-sampling exact"],
)
def test_sampled_answer_fails_where_the_very_tokens_are_wanted(sampling: Sampling, config: dict[str, Any]) -> None:
    case = Case([7, 8, Reason.DISCONNECTED], card=DRAWING, **config)

    assert case.fails(make_request(sampling=sampling)).reason is Reason.DISCONNECTED
