"""Migrate: a lost worker costs the client nothing but time."""

from collections.abc import Sequence
from typing import Any

import pytest

from services.card import Resume
from services.errors import Failure, Reason
from services.frontend.migrate import Migrate, MigrateConfig, Progress, may_migrate
from services.request import FinishReason, Request, Sampling
from tests.support import Collected, Script, Step, call_layer, make_request, run_async

LOST = (
    Reason.CANNOT_CONNECT,
    Reason.DISCONNECTED,
    Reason.STALLED,
    Reason.STREAM_INCOMPLETE,
    Reason.PROTOCOL_VIOLATION,
    Reason.ENGINE_DEAD,
)
NEVER = (
    Reason.OVERLOADED,
    Reason.NO_WORKERS,
    Reason.INVALID_ARGUMENT,
    Reason.PROMPT_TOO_LONG,
    Reason.MODEL_NOT_FOUND,
    Reason.DEADLINE_EXCEEDED,
    Reason.CANCELLED,
    Reason.INTERNAL,
)


class Case:
    """A Migrate layer over a script, and what it reported."""

    def __init__(self, *takes: Sequence[Step], resume: Resume | None = None, **config: Any) -> None:
        self.script = Script(*takes)
        self.moves: list[bool] = []
        self.layer = Migrate(
            self.script,
            MigrateConfig(**config),
            resume_of=lambda _: resume or Resume(),
            on_move=lambda _, has_tokens: self.moves.append(has_tokens),
        )

    def run(self, request: Request | None = None) -> Collected:
        return run_async(call_layer(self.layer, request or make_request()))

    def fails(self, request: Request | None = None) -> Failure:
        with pytest.raises(Failure) as caught:
            self.run(request)
        return caught.value


def test_passes_an_undisturbed_answer_through() -> None:
    case = Case([7, 8, FinishReason.STOP])

    result = case.run()

    assert (result.token_ids, result.finish and result.finish.reason, case.moves) == ([7, 8], FinishReason.STOP, [])


@pytest.mark.parametrize("reason", LOST)
def test_continues_on_another_worker_after_the_last_token_delivered(reason: Reason) -> None:
    case = Case([7, 8, reason], [9, 10])

    result = case.run(make_request(prompt=(1, 2), max_tokens=4))

    assert result.token_ids == [7, 8, 9, 10]
    assert case.script.requests[1].generated_token_ids == (7, 8)
    assert case.script.requests[1].max_tokens == 4
    assert case.script.requests[1].prompt_token_ids == (1, 2)


def test_a_request_that_brings_generated_tokens_keeps_them_in_front() -> None:
    case = Case([8, Reason.DISCONNECTED], [9])

    case.run(make_request(generated_token_ids=(5, 6)))

    assert case.script.requests[1].generated_token_ids == (5, 6, 8)


def test_excludes_the_worker_that_failed() -> None:
    async def failing(request: Request, call: Any, sink: Any) -> Any:
        calls.append(call)
        failure = Failure(Reason.DISCONNECTED, "gone")
        failure.worker = f"worker-{len(calls)}"
        raise failure

    calls: list[Any] = []
    layer = Migrate(failing, MigrateConfig(limit=2), resume_of=lambda _: Resume(), on_move=lambda *_: None)

    with pytest.raises(Failure):
        run_async(call_layer(layer, make_request()))

    assert [call.excluded for call in calls] == [set(), {"worker-1"}, {"worker-1", "worker-2"}]
    assert [call.replacement_deadline is not None for call in calls] == [False, True, True]


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_moves_at_most_limit_times(limit: int) -> None:
    takes: list[list[Step]] = [[7, Reason.DISCONNECTED] for _ in range(limit + 1)]
    case = Case(*takes, limit=limit)

    assert case.fails().reason is Reason.DISCONNECTED
    assert len(case.script.requests) == limit + 1
    assert len(case.moves) == limit


def test_gives_the_failure_that_cost_the_worker_not_that_of_the_last_try() -> None:
    case = Case([7, Reason.STALLED], [Reason.CANNOT_CONNECT], [Reason.NO_WORKERS])

    assert case.fails().reason is Reason.STALLED


@pytest.mark.parametrize("reason", NEVER)
def test_never_moves_what_would_fail_elsewhere_too(reason: Reason) -> None:
    case = Case([7, reason])

    assert case.fails().reason is reason
    assert case.moves == []


def test_a_refusal_for_capacity_is_free() -> None:
    refusals: list[list[Step]] = [[Reason.WORKER_AT_CAPACITY] for _ in range(5)]
    case = Case(*refusals, [7], limit=1)

    assert case.run().token_ids == [7]


def test_a_refused_new_request_does_not_wait_for_a_worker_but_a_begun_answer_does() -> None:
    new = Case([Reason.WORKER_AT_CAPACITY], [7])
    begun = Case([7, Reason.DISCONNECTED], [Reason.WORKER_AT_CAPACITY], [8])

    new.run()
    begun.run()

    assert [call.replacement_deadline is None for call in new.script.calls] == [True, True]
    assert [call.replacement_deadline is None for call in begun.script.calls] == [True, False, False]


def test_an_engine_error_is_tried_once_elsewhere_and_only_before_the_first_token() -> None:
    before = Case([Reason.ENGINE_ERROR], [7])
    twice = Case([Reason.ENGINE_ERROR], [Reason.ENGINE_ERROR], [7])
    after = Case([7, Reason.ENGINE_ERROR], [8])

    assert before.run().token_ids == [7]
    assert twice.fails().reason is Reason.ENGINE_ERROR
    assert after.fails().reason is Reason.ENGINE_ERROR


def test_finishes_by_itself_when_all_that_was_asked_has_been_delivered() -> None:
    case = Case([7, 8, Reason.DISCONNECTED])

    result = case.run(make_request(max_tokens=2))

    assert result.finish is not None
    assert result.finish.reason is FinishReason.LENGTH
    assert case.moves == []


def test_tells_new_from_ongoing_requests() -> None:
    case = Case([Reason.DISCONNECTED], [7, Reason.DISCONNECTED], [8])

    case.run()

    assert case.moves == [False, True]


@pytest.mark.parametrize(("seq_len_max", "moves"), [(4, True), (3, False)])
def test_strictly_above_seq_len_max_a_request_does_not_move(seq_len_max: int, moves: bool) -> None:
    case = Case([7, 8, Reason.DISCONNECTED], [9], seq_len_max=seq_len_max)

    if moves:
        assert case.run(make_request(prompt=(1, 2))).token_ids == [7, 8, 9]
    else:
        assert case.fails(make_request(prompt=(1, 2))).reason is Reason.DISCONNECTED


def test_a_prompt_above_seq_len_max_is_not_tracked_at_all() -> None:
    case = Case([Reason.DISCONNECTED], [7], seq_len_max=1)

    assert case.fails(make_request(prompt=(1, 2))).reason is Reason.DISCONNECTED


def test_does_not_move_what_the_engine_cannot_resume_exactly() -> None:
    sampled = make_request(sampling=Sampling(temperature=0.8, seed=1))
    penalised = make_request(sampling=Sampling(temperature=0.0, seed=1, presence_penalty=1.0))
    take: list[Step] = [7, Reason.DISCONNECTED]

    assert Case(take, [8], resume=Resume(sampling=False)).run().token_ids == [7, 8]
    assert Case(take, [8], resume=Resume(sampling=False)).fails(sampled).reason is Reason.DISCONNECTED
    assert Case(take, [8], resume=Resume(penalties=False)).fails(penalised).reason is Reason.DISCONNECTED


def test_a_request_without_tokens_moves_whatever_the_engine_can_resume() -> None:
    sampled = make_request(sampling=Sampling(temperature=0.8, seed=1))

    assert Case([Reason.DISCONNECTED], [8], resume=Resume(sampling=False)).run(sampled).token_ids == [8]


def test_free_moves_are_bounded_too() -> None:
    refused = Failure(Reason.WORKER_AT_CAPACITY, "full")

    assert may_migrate(refused, Progress(0, 63, 0, True), MigrateConfig(), can_resume=True)
    assert not may_migrate(refused, Progress(0, 64, 0, True), MigrateConfig(), can_resume=True)


def test_leaves_nothing_running_when_the_client_hangs_up() -> None:
    async def scenario() -> int:
        import asyncio

        case = Case([7, "hang"])
        async with asyncio.TaskGroup() as group:
            task = group.create_task(call_layer(case.layer, make_request()))
            await case.script.hanging.wait()
            task.cancel()
        return case.script.cancelled_count

    assert run_async(scenario()) == 1
