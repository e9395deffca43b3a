"""Migrate: a lost worker costs the client nothing but time, and one that leaves not even that."""

import asyncio
import gc
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from services.core.call import Call
from services.core.errors import Failure, Reason
from services.core.interface import Delta, Finish, Sink, TokenLogprobs
from services.core.model_card import ModelCard, Resume
from services.core.request import FinishReason, Request, Sampling
from services.frontend.layers.migrate import Migrate, MigrateConfig
from services.frontend.migration.policy import FREE_MOVES_MAX, LAG_TOKENS_MAX, ROUNDS_MAX
from tests.support.doubles import CARD, HANG, Collected, FakeWorker, Script, Step, call_layer, make_request, run_async

ABLE = replace(CARD, resume=Resume(sampling=True, penalties=True, guided=True, logprobs=True))


class Counts:
    """What a migration reports."""

    def __init__(self) -> None:
        self.moves: list[bool] = []
        self.recomputed: list[int] = []
        self.outcomes: list[str] = []
        self.exceeded = 0
        self.limit = -1

    def count_move(self, model: str, *, has_tokens: bool, recomputed: int) -> None:
        self.moves.append(has_tokens)
        self.recomputed.append(recomputed)

    def observe_move(self, model: str, *, has_tokens: bool, outcome: str, seconds: float) -> None:
        assert 0 <= seconds < 10
        self.outcomes.append(outcome)

    def count_exceeded(self, model: str) -> None:
        self.exceeded += 1

    def set_limit(self, model: str, limit: int) -> None:
        self.limit = limit


class Case:
    """A Migrate layer over a script, and what it reported."""

    def __init__(self, *takes: Sequence[Step], card: ModelCard = ABLE, **config: Any) -> None:
        self.script = Script(*takes)
        self.counts = Counts()
        self.layer = Migrate(self.script, MigrateConfig(**config), self.counts)
        self.card = card

    def run(self, request: Request | None = None, **call: Any) -> Collected:
        return run_async(call_layer(self.layer, request or make_request(), card=self.card, **call))

    def fails(self, request: Request | None = None, **call: Any) -> Failure:
        with pytest.raises(Failure) as caught:
            self.run(request, **call)
        return caught.value


# A worker is lost


def test_passes_an_undisturbed_answer_through() -> None:
    case = Case([7, 8, FinishReason.STOP])

    result = case.run()

    assert result.token_ids == [7, 8]
    assert result.finish == Finish(FinishReason.STOP)
    assert case.counts.moves == []


def test_continues_on_another_worker_after_the_last_token_delivered() -> None:
    case = Case([7, 8, Reason.DISCONNECTED], [9, 10])

    result = case.run(make_request(prompt=(1, 2), max_tokens=4))

    assert result.token_ids == [7, 8, 9, 10]
    assert case.script.requests[1].generated_token_ids == (7, 8)
    assert case.script.requests[1].max_tokens == 4
    assert case.script.requests[1].prompt_token_ids == (1, 2)


def test_a_request_that_brings_generated_tokens_keeps_them_in_front() -> None:
    case = Case([8, Reason.DISCONNECTED], [9])

    case.run(make_request(generated_token_ids=(5, 6)))

    assert case.script.requests[1].generated_token_ids == (5, 6, 8)


def test_excludes_each_worker_that_failed_and_may_wait_for_another() -> None:
    calls: list[Call] = []

    async def failing(request: Request, call: Call, sink: Sink) -> Finish:
        calls.append(call)
        call.attempt.session = FakeWorker(f"worker-{len(calls)}")
        raise Failure(Reason.STALLED, "gone")

    layer = Migrate(failing, MigrateConfig(limit=2), Counts())
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
    assert len(case.counts.moves) == limit


def test_the_client_may_lower_the_limit() -> None:
    assert Case([7, Reason.STALLED], [8]).fails(migration_limit=0).reason is Reason.STALLED


def test_gives_the_failure_that_cost_the_worker_not_that_of_the_last_try() -> None:
    case = Case([7, Reason.STALLED], [Reason.CANNOT_CONNECT], [Reason.NO_WORKERS])

    failure = case.fails()

    assert failure.reason is Reason.STALLED
    assert failure.detail == "STALLED as scripted; and then: NO_WORKERS as scripted"


def test_w7_a_refusal_for_capacity_is_free_and_immediate_elsewhere() -> None:
    refusals: list[list[Step]] = [[Reason.WORKER_AT_CAPACITY] for _ in range(5)]
    case = Case(*refusals, [7], limit=1)

    assert case.run().token_ids == [7]
    assert {call.replacement_deadline for call in case.script.calls} == {None}


def test_a_request_that_every_worker_refused_is_told_of_the_capacity() -> None:
    """Also when one has room again by the time that none is left to try."""
    assert Case([Reason.WORKER_AT_CAPACITY], [Reason.NO_WORKERS]).fails().reason is Reason.WORKER_AT_CAPACITY


def refused(cause: str, reason: Reason = Reason.WORKER_AT_CAPACITY) -> Failure:
    return Failure(reason, f"full of {cause}", metadata={"cause": cause})


CROWDED = refused("capacity", Reason.OVERLOADED)
BUSY = refused("busy_threshold", Reason.OVERLOADED)


@pytest.mark.parametrize(
    ("refusals", "told"),
    [
        ([refused("queue_tokens"), Failure(Reason.NO_WORKERS, "none left")], "queue_tokens"),
        ([refused("queue_tokens"), CROWDED], "queue_tokens"),
        ([refused("queue_tokens"), refused("capacity"), CROWDED], "queue_tokens"),
        ([refused("capacity"), refused("queue_timeout"), CROWDED], "queue_timeout"),
        ([refused("capacity"), CROWDED], "capacity"),
        ([refused("queue_tokens"), BUSY], "busy_threshold"),
    ],
)
def test_what_only_a_worker_could_know_is_told_before_what_is_known_of_all(refusals: list[Failure], told: str) -> None:
    """A bug: a client was told of all running and waiting, though it was the tokens for which there was no room."""
    failure = Case(*([one] for one in refusals)).fails()

    assert (failure.detail, failure.metadata) == (f"full of {told}", {"cause": told})


def test_what_is_no_refusal_is_not_hidden_by_one() -> None:
    assert Case([refused("queue_tokens")], [Reason.INVALID_ARGUMENT]).fails().reason is Reason.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "reason", [Reason.GRAMMAR_REPLAY_MISMATCH, Reason.DEADLINE_EXCEEDED, Reason.INVALID_ARGUMENT, Reason.INTERNAL]
)
def test_what_no_other_worker_could_mend_is_told_as_such_even_after_a_loss(reason: Reason) -> None:
    assert Case([7, Reason.DISCONNECTED], [reason]).fails().reason is reason


def test_refusals_after_a_loss_neither_prolong_the_wait_nor_use_up_the_free_moves() -> None:
    refusals: list[list[Step]] = [[Reason.WORKER_AT_CAPACITY] for _ in range(FREE_MOVES_MAX + 5)]
    case = Case([7, Reason.DISCONNECTED], *refusals, [8])

    assert case.run().token_ids == [7, 8]
    assert len({call.replacement_deadline for call in case.script.calls[1:]}) == 1


@pytest.mark.parametrize("reason", [Reason.DISCONNECTED, Reason.DRAINING])
def test_the_next_loss_may_be_waited_for_anew(reason: Reason) -> None:
    case = Case([7, Reason.DISCONNECTED], [8, reason], [9])

    case.run()

    first, second = (call.replacement_deadline for call in case.script.calls[1:])
    assert first is not None
    assert second is not None
    assert second > first


def test_a_request_that_no_engine_had_begun_with_killed_nobody() -> None:
    async def dying(request: Request, call: Call, sink: Sink) -> Finish:
        calls.append(call)
        raise Failure(Reason.DISCONNECTED, "gone while the request was in the queue")

    calls: list[Call] = []
    with pytest.raises(Failure) as caught:
        run_async(call_layer(Migrate(dying, MigrateConfig(), Counts()), make_request(), card=ABLE))

    assert caught.value.reason is Reason.DISCONNECTED
    assert len(calls) == 4


def test_the_limit_is_told_as_frontend_and_worker_set_it() -> None:
    case = Case([7], card=replace(ABLE, migration_limit=2), limit=3)

    case.run(migration_limit=1)

    assert case.counts.limit == 2


def test_an_engine_error_is_tried_elsewhere_at_once_or_not_at_all() -> None:
    """Its worker is not lost: there is nothing to wait for."""
    case = Case([Reason.ENGINE_ERROR], [Reason.NO_WORKERS])

    assert case.fails().reason is Reason.ENGINE_ERROR
    assert case.script.calls[1].replacement_deadline is None


def test_a_refusal_is_not_counted_as_a_move() -> None:
    case = Case([Reason.WORKER_AT_CAPACITY], [Reason.DRAINING], [7])

    case.run()

    assert case.counts.moves == []


def test_a_request_that_lost_its_worker_does_not_give_up_one_that_is_merely_full() -> None:
    case = Case([Reason.STALLED], [Reason.WORKER_AT_CAPACITY], [7])

    case.run()

    assert case.script.calls[2].excluded == case.script.calls[1].excluded


def test_a_begun_answer_that_is_refused_waits_for_a_slot() -> None:
    case = Case([7, Reason.DISCONNECTED], [Reason.WORKER_AT_CAPACITY], [8])

    assert case.run().token_ids == [7, 8]
    assert [call.replacement_deadline is None for call in case.script.calls] == [True, False, False]


def test_finishes_by_itself_when_all_that_was_asked_has_been_delivered() -> None:
    case = Case([7, 8, Reason.DISCONNECTED])

    result = case.run(make_request(max_tokens=2))

    assert result.finish == Finish(FinishReason.LENGTH)
    assert case.counts.moves == []


def test_a_request_that_kills_two_workers_is_poison_and_no_third_is_tried() -> None:
    case = Case([Reason.DISCONNECTED], [Reason.ENGINE_DEAD], [7])

    assert case.fails().reason is Reason.POISON_REQUEST
    assert len(case.script.requests) == 2


def test_a_refusal_between_two_deaths_does_not_make_them_harmless() -> None:
    case = Case([Reason.DISCONNECTED], [Reason.WORKER_AT_CAPACITY], [Reason.DISCONNECTED], [7])

    assert case.fails().reason is Reason.POISON_REQUEST


def test_a_request_beside_a_poison_request_is_none() -> None:
    """It had tokens from the first worker that died, and came to the second one together with the culprit."""
    case = Case([7, Reason.DISCONNECTED], [Reason.DISCONNECTED], [8])

    assert case.run().token_ids == [7, 8]


def test_a_request_that_kills_in_the_middle_of_its_answer_stops_after_three() -> None:
    case = Case([7, Reason.DISCONNECTED], [Reason.DISCONNECTED], [Reason.DISCONNECTED], [8])

    assert case.fails().reason is Reason.POISON_REQUEST
    assert len(case.script.requests) == 3


def test_a_worker_that_was_only_silent_did_not_die_of_the_request() -> None:
    assert Case([Reason.STALLED], [Reason.DISCONNECTED], [7]).run().token_ids == [7]


def test_a_request_that_meets_two_deaths_with_tokens_between_is_none() -> None:
    case = Case([7, Reason.DISCONNECTED], [8, Reason.DISCONNECTED], [9])

    assert case.run().token_ids == [7, 8, 9]


def test_w9_counts_moves_only_and_tells_new_from_ongoing_requests() -> None:
    case = Case([Reason.STALLED], [7, Reason.DISCONNECTED], [8])
    off = Case([7, Reason.DISCONNECTED], limit=0)

    case.run(make_request(prompt=(1, 2)))
    off.fails()

    assert case.counts.moves == [False, True]
    assert case.counts.recomputed == [2, 3]
    assert case.counts.outcomes == ["success", "success"]
    assert off.counts.moves == []


def test_a_move_that_leads_nowhere_is_told_as_such() -> None:
    case = Case([7, Reason.STALLED], [Reason.NO_WORKERS])

    case.fails()

    assert case.counts.outcomes == ["failure"]


def test_each_move_of_several_without_a_token_between_is_told() -> None:
    case = Case([7, Reason.STALLED], [Reason.STALLED], [8])

    case.run()

    assert case.counts.outcomes == ["failure", "success"]


@pytest.mark.parametrize(("seq_len_max", "moves"), [(4, True), (3, False)])
def test_strictly_above_seq_len_max_a_request_does_not_move(seq_len_max: int, moves: bool) -> None:
    case = Case([7, 8, Reason.DISCONNECTED], [9], seq_len_max=seq_len_max)
    request = make_request(prompt=(1, 2))

    if moves:
        assert case.run(request).token_ids == [7, 8, 9]
    else:
        assert case.fails(request).reason is Reason.DISCONNECTED
    assert case.counts.exceeded == 1  # The third token exceeds it in any case.


def test_a_prompt_above_seq_len_max_is_not_tracked_at_all() -> None:
    begun = Case([7, Reason.DISCONNECTED], [8], seq_len_max=1)
    new = Case([Reason.DISCONNECTED], [7], seq_len_max=1)

    assert begun.fails(make_request(prompt=(1, 2))).reason is Reason.DISCONNECTED
    assert begun.counts.exceeded == 1
    assert new.run(make_request(prompt=(1, 2))).token_ids == [7]  # It has nothing yet that would have to be known.


def test_does_not_move_what_the_engine_cannot_resume_exactly() -> None:
    sampled = make_request(sampling=Sampling(temperature=0.8, seed=1))
    unable = replace(ABLE, resume=Resume(sampling=False))
    take: list[Step] = [7, Reason.DISCONNECTED]

    assert Case(take, [8], card=unable).run().token_ids == [7, 8]
    assert Case(take, [8], card=unable).fails(sampled).reason is Reason.DISCONNECTED
    assert Case([Reason.DISCONNECTED], [8], card=unable).run(sampled).token_ids == [8]


@pytest.mark.parametrize("raised", [Reason.OVERLOADED, Reason.INVALID_ARGUMENT, Reason.DEADLINE_EXCEEDED])
def test_never_moves_what_would_fail_elsewhere_too(raised: Reason) -> None:
    case = Case([7, raised])

    assert case.fails().reason is raised
    assert case.counts.moves == []


def test_a_bug_below_is_not_taken_for_a_failure() -> None:
    with pytest.raises(ValueError, match="bug"):
        Case([7, ValueError("bug")]).run()


def test_leaves_nothing_running_when_the_client_hangs_up() -> None:
    async def scenario() -> Case:
        case = Case([7, Reason.DISCONNECTED], ["hang"])
        async with asyncio.TaskGroup() as group:
            task = group.create_task(call_layer(case.layer, make_request()))
            await case.script.hanging.wait()
            task.cancel()
        return case

    case = run_async(scenario())
    assert case.script.cancelled_count == 1
    assert case.counts.outcomes == ["cancelled"]


def test_an_undisturbed_request_takes_no_task_of_its_own() -> None:
    async def scenario() -> set[asyncio.Task[Any]]:
        script = Script([HANG])
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(call_layer(Migrate(script, MigrateConfig(), Counts()), make_request()))
            await script.hanging.wait()
            others = asyncio.all_tasks() - {asking}
            asking.cancel()
        return others

    assert len(run_async(scenario())) == 1, "that of the test"


@pytest.fixture
def _no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collector")
def test_an_undisturbed_request_leaves_nothing_to_the_garbage_collector() -> None:
    """All that was made for it is known from here: a circle would keep it until the next collection."""

    async def scenario() -> weakref.ref[Collected]:
        collected = Collected()
        layer = Migrate(Forgetful([7, 8]), MigrateConfig(), Counts())
        await layer(make_request(), Call(request_id="r", card=ABLE), collected)
        return weakref.ref(collected)

    assert run_async(scenario())() is None


class Forgetful(Script):
    """Keeps nothing of what it was called with."""

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        try:
            return await super().__call__(request, call, sink)
        finally:
            self.calls.clear()


# A worker leaves


class Stage:
    """Workers that a test moves by hand: each call of the layer is a part that delivers when it is told."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.entered = asyncio.Event()
        self.counts = Counts()
        self.has_workers = True

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        part = Part(request, call, sink)
        if self.has_workers:
            call.attempt.session = FakeWorker(f"worker-{len(self.parts) + 1}")
        self.parts.append(part)
        self.entered.set()
        try:
            return await part.ended
        except asyncio.CancelledError:
            part.is_cut = True
            raise

    async def part(self, index: int) -> "Part":
        while len(self.parts) <= index:
            self.entered.clear()
            await self.entered.wait()
        return self.parts[index]


class Part:
    """One attempt on a stage."""

    def __init__(self, request: Request, call: Call, sink: Sink) -> None:
        self.request = request
        self.call = call
        self._sink = sink
        self._position = len(request.generated_token_ids)
        self.ended: asyncio.Future[Finish] = asyncio.get_running_loop().create_future()
        self.is_cut = False

    def say(self, *token_ids: int) -> None:
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
    play: Play, request: Request | None = None, *, card: ModelCard = ABLE, **config: Any
) -> tuple[Stage, Collected]:
    """Run a request on a stage; `play` must bring it to its end."""

    async def scenario() -> tuple[Stage, Collected]:
        stage = Stage()
        layer = Migrate(stage, MigrateConfig(**config), stage.counts)
        async with asyncio.TaskGroup() as group:
            answer = group.create_task(call_layer(layer, request or make_request(), card=card))
            await play(stage)
        return stage, answer.result()

    return run_async(scenario())


def test_the_source_streams_on_until_the_target_delivers_the_next_token() -> None:
    async def play(stage: Stage) -> None:
        source = await stage.part(0)
        source.say(7)
        source.leave()
        target = await stage.part(1)
        assert target.request.generated_token_ids == (7,)
        assert target.call.excluded == {"worker-1"}
        assert not source.is_cut
        target.say(8)
        target.say(9)
        target.finish()

    stage, answer = staged(play)

    assert answer.token_ids == [7, 8, 9]
    assert stage.parts[0].is_cut
    assert stage.counts.moves == [True]


def test_a_target_that_is_a_little_behind_takes_over_and_repeats_nothing() -> None:
    async def play(stage: Stage) -> None:
        source = await stage.part(0)
        source.leave()
        target = await stage.part(1)
        source.say(*range(LAG_TOKENS_MAX))
        target.say(*range(LAG_TOKENS_MAX + 2))
        source.say(99)  # Too late: nobody hears it.
        target.finish()

    _, answer = staged(play, make_request(logprobs=0))

    assert answer.token_ids == [0, 1, 2]
    assert [one.logprob for delta in answer.deltas for one in delta.logprobs or ()] == [0.0, -1.0, -2.0]


def test_a_target_that_is_far_behind_starts_again_from_where_the_source_is() -> None:
    async def play(stage: Stage) -> None:
        source = await stage.part(0)
        source.leave()
        late = await stage.part(1)
        source.say(7, 8, 9)
        late.say(7)
        target = await stage.part(2)
        assert target.request.generated_token_ids == (7, 8, 9)
        target.say(10)
        target.finish()

    stage, answer = staged(play)

    assert answer.token_ids == [7, 8, 9, 10]
    assert stage.parts[1].is_cut
    assert stage.counts.moves == [True]


def test_a_target_that_never_catches_up_takes_over_in_the_end() -> None:
    async def play(stage: Stage) -> None:
        source, spoken = await stage.part(0), 0
        source.leave()
        for round_ in range(1, ROUNDS_MAX + 2):
            target = await stage.part(round_)
            source.say(*range(spoken, spoken + 3))
            spoken += 3
            target.say(spoken - 3)
        assert source.is_cut is False
        target.say(spoken - 2, spoken - 1, spoken)
        target.finish()

    _, answer = staged(play)

    assert answer.token_ids == list(range(3 * (ROUNDS_MAX + 1) + 1))


def test_a_source_that_finishes_first_finishes_the_request() -> None:
    async def play(stage: Stage) -> None:
        source = await stage.part(0)
        source.leave()
        await stage.part(1)
        source.say(7)
        source.finish()

    stage, answer = staged(play)

    assert answer.token_ids == [7]
    assert stage.parts[1].is_cut
    assert stage.counts.moves == []


def test_a_source_that_dies_meanwhile_leaves_its_place_to_the_target() -> None:
    async def play(stage: Stage) -> None:
        source = await stage.part(0)
        source.say(7)
        source.leave()
        target = await stage.part(1)
        source.say(8)
        source.fail(Reason.DISCONNECTED)
        target.say(8, 9)
        target.finish()

    stage, answer = staged(play)

    assert answer.token_ids == [7, 8, 9]
    assert len(stage.parts) == 2


def test_a_target_that_fails_gives_its_place_to_another_and_the_source_goes_on() -> None:
    async def play(stage: Stage) -> None:
        source = await stage.part(0)
        source.leave()
        (await stage.part(1)).fail(Reason.WORKER_AT_CAPACITY)
        source.say(7)
        other = await stage.part(2)
        assert other.call.excluded == {"worker-1", "worker-2"}
        assert other.call.replacement_deadline == (await stage.part(1)).call.replacement_deadline
        other.say(8)
        other.finish()

    _, answer = staged(play)

    assert answer.token_ids == [7, 8]


def test_where_no_target_is_to_be_had_the_source_goes_on_to_its_end() -> None:
    async def play(stage: Stage) -> None:
        source = await stage.part(0)
        source.leave()
        (await stage.part(1)).fail(Reason.NO_WORKERS)
        source.say(7)
        await asyncio.sleep(0)
        source.fail(Reason.DRAINING)
        last = await stage.part(2)
        last.say(8)
        last.finish()

    stage, answer = staged(play)

    assert answer.token_ids == [7, 8]
    assert len(stage.parts) == 3


def test_targets_are_not_tried_for_ever() -> None:
    async def play(stage: Stage) -> None:
        source = await stage.part(0)
        source.leave()
        for index in range(1, ROUNDS_MAX + 2):
            (await stage.part(index)).fail(Reason.STALLED)
            await asyncio.sleep(0)
        source.finish()

    stage, _ = staged(play)

    assert len(stage.parts) == ROUNDS_MAX + 2


def test_a_source_that_dies_while_the_target_waits_for_a_worker_may_wait_as_long_as_any() -> None:
    async def play(stage: Stage) -> None:
        source = await stage.part(0)
        source.say(7)
        stage.has_workers = False
        source.call.attempt.on_leaving(0.0)
        waiting = await stage.part(1)
        source.fail(Reason.ENGINE_DEAD)
        last = await stage.part(2)
        assert waiting.call.replacement_deadline is not None
        assert last.call.replacement_deadline is not None
        assert last.call.replacement_deadline > waiting.call.replacement_deadline + 5
        last.say(8)
        last.finish()

    stage, answer = staged(play, replacement_wait_s=10)

    assert answer.token_ids == [7, 8]
    assert stage.parts[1].is_cut


def test_a_request_that_waited_for_a_slot_of_a_worker_that_left_may_wait_for_room_elsewhere() -> None:
    """It had been taken, as one had that was answered: until now a drain under load refused it, and a kill did not."""

    async def play(stage: Stage) -> None:
        source = await stage.part(0)
        source.leave()
        for index in range(1, ROUNDS_MAX + 2):
            (await stage.part(index)).fail(Reason.WORKER_AT_CAPACITY)
            await asyncio.sleep(0)
        source.fail(Reason.DRAINING)
        last = await stage.part(ROUNDS_MAX + 2)
        assert last.call.replacement_deadline is not None
        assert last.call.excluded == {"worker-1"}
        last.say(7)
        last.finish()

    _, answer = staged(play)

    assert answer.token_ids == [7]


def test_a_target_whose_worker_leaves_is_replaced_as_soon_as_it_has_taken_over() -> None:
    async def play(stage: Stage) -> None:
        source = await stage.part(0)
        source.leave()
        second = await stage.part(1)
        second.leave()
        second.say(7)
        third = await stage.part(2)
        third.say(8)
        third.finish()

    _, answer = staged(play)

    assert answer.token_ids == [7, 8]


def test_a_source_that_has_finished_is_not_taken_over() -> None:
    async def play(stage: Stage) -> None:
        source = await stage.part(0)
        source.say(7)
        source.leave()
        second = await stage.part(1)
        source.finish()
        await asyncio.sleep(0)
        second.say(8)

    _, answer = staged(play)

    assert answer.token_ids == [7]


@pytest.mark.parametrize(
    ("card", "config"),
    [(replace(ABLE, resume=Resume(sampling=False)), {}), (ABLE, {"seq_len_max": 2})],
    ids=["cannot be resumed", "is not tracked any more"],
)
def test_an_answer_that_has_begun_meanwhile_is_not_mixed_with_another_if_it(
    card: ModelCard, config: dict[str, Any]
) -> None:
    async def play(stage: Stage) -> None:
        source = await stage.part(0)
        source.leave()
        second = await stage.part(1)
        source.say(7)
        second.say(50, 51)
        source.say(8)
        source.finish()

    stage, answer = staged(play, make_request(sampling=Sampling(temperature=0.8, seed=1)), card=card, **config)

    assert answer.token_ids == [7, 8]
    assert stage.parts[1].is_cut


def test_a_worker_that_leaves_as_the_client_hangs_up_starts_nothing() -> None:
    """A bug: it raised in the session, and took all its streams along."""

    async def scenario() -> Stage:
        stage = Stage()
        layer = Migrate(stage, MigrateConfig(), stage.counts)
        running = asyncio.ensure_future(call_layer(layer, make_request(), card=ABLE))
        source = await stage.part(0)
        running.cancel()
        for _ in range(5):
            source.leave()
            await asyncio.sleep(0)
        await asyncio.wait([running])
        return stage

    assert len(run_async(scenario()).parts) <= 2


End = Callable[[Stage, "asyncio.Task[Collected]"], Coroutine[Any, Any, None]]


def ended(end: End) -> Stage:
    """The stage of a request that `end` brings to its end, and sees it: none of its tasks is left then."""

    async def scenario() -> Stage:
        stage = Stage()
        layer = Migrate(stage, MigrateConfig(), stage.counts)
        before = asyncio.all_tasks()
        await end(stage, asyncio.ensure_future(call_layer(layer, make_request(), card=ABLE)))
        assert asyncio.all_tasks() == before
        return stage

    return run_async(scenario())


@pytest.mark.parametrize("takes_over", [False, True], ids=["before it takes over", "after it has taken over"])
def test_a_bug_in_a_target_is_not_taken_for_a_failure_and_ends_the_request(takes_over: bool) -> None:
    async def end(stage: Stage, running: "asyncio.Task[Collected]") -> None:
        source = await stage.part(0)
        source.say(7)
        source.leave()
        target = await stage.part(1)
        if takes_over:
            target.say(8)
        target.ended.set_exception(ValueError("bug"))
        with pytest.raises(ValueError, match="bug"):
            await running

    assert ended(end).parts[0].is_cut


def test_no_target_outlives_a_request_that_has_finished() -> None:
    async def end(stage: Stage, running: "asyncio.Task[Collected]") -> None:
        source = await stage.part(0)
        source.leave()
        await stage.part(1)
        source.finish()
        await running

    assert ended(end).parts[1].is_cut


def test_a_client_that_hangs_up_leaves_neither_source_nor_target_running() -> None:
    async def end(stage: Stage, running: "asyncio.Task[Collected]") -> None:
        (await stage.part(0)).leave()
        await stage.part(1)
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()

    assert [part.is_cut for part in ended(end).parts] == [True, True]


def test_a_target_with_nothing_left_to_say_ends_the_answer() -> None:
    async def play(stage: Stage) -> None:
        source = await stage.part(0)
        source.say(7)
        source.leave()
        (await stage.part(1)).finish()

    stage, answer = staged(play)

    assert answer.finish == Finish(FinishReason.STOP)
    assert stage.parts[0].is_cut
    assert stage.counts.outcomes == ["success"]


def test_a_target_may_leave_in_its_turn() -> None:
    async def play(stage: Stage) -> None:
        for index in range(3):
            part = await stage.part(index)
            part.say(index)
            part.leave()
        last = await stage.part(3)
        last.say(3)
        last.finish()

    stage, answer = staged(play)

    assert answer.token_ids == [0, 1, 2, 3]
    assert stage.counts.moves == [True, True, True]


def test_nothing_is_planned_where_nothing_may_move() -> None:
    async def play(stage: Stage) -> None:
        source = await stage.part(0)
        source.leave()
        source.say(7)
        source.finish()

    stage, _ = staged(play, limit=0)

    assert len(stage.parts) == 1


def test_nothing_starts_and_nothing_is_delivered_once_the_client_has_hung_up() -> None:
    """What a worker sends may come in the same turn: the target is cut, but has not noticed."""

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
        layer = Migrate(script, MigrateConfig(), Counts())
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
