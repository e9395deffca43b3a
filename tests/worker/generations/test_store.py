"""The generations of a worker: started once, adopted by epoch, kept without an owner for a time and within bounds."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from services.core.call import Call, Cause
from services.core.choice_group import ChoiceGroup
from services.core.errors import Failure, Reason
from services.core.request import FinishReason
from services.worker.generations import store as module
from services.worker.generations.generation import Generation
from services.worker.generations.store import DetachConfig, GenerationStore
from tests.support.clock import pass_time, run_clocked, settle
from tests.support.doubles import make_request
from tests.worker.generations.support import (
    ID,
    OTHER_ID,
    Bench,
    ManualPipeline,
    RecordingOwner,
    Running,
    make_spec,
    play,
)


def numbered(number: int) -> bytes:
    return number.to_bytes(16, "big")


# Submits


def test_submit_replaces_a_record_with_the_same_id_and_index() -> None:
    async def scenario(bench: Bench) -> None:
        former_owner = RecordingOwner()
        former, old = await bench.start(former_owner)
        new, running = await bench.start()
        assert bench.store.locate(ID) == [new]
        assert (former_owner.reasons, former.ending.cause) == ([Reason.TAKEN_OVER], Cause.REPLACED)
        assert (old.is_cancelled, running.is_cancelled) == (True, False)

    play(scenario)


def test_submit_replaces_a_record_without_an_owner() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.start_detached()
        new, _ = await bench.start()
        assert bench.store.locate(ID) == [new]
        assert (bench.store.detached_count, bench.store.detached_bytes) == (0, 0)
        pass_time(1000)
        await settle()
        assert bench.store.locate(ID) == [new]
        assert not bench.store.is_expired(ID), "the timer of the former one is gone"

    play(scenario)


def test_submit_with_a_lower_epoch_than_that_of_the_record_is_refused() -> None:
    async def scenario(bench: Bench) -> None:
        former, _ = await bench.start(epoch=5)
        with pytest.raises(Failure) as caught:
            await bench.start(epoch=4)
        assert caught.value.reason is Reason.TAKEN_OVER
        assert bench.store.locate(ID) == [former]
        assert len(bench.pipeline.running) == 1

    play(scenario)


def test_refused_submit_claims_no_place_of_its_choice_group() -> None:
    """A bug: the place of a choice that had been taken over stayed reserved for ever."""

    async def scenario(bench: Bench) -> None:
        await bench.start(epoch=5)
        choice_group = ChoiceGroup(2)
        with pytest.raises(Failure):
            await bench.start(choice_group=choice_group)
        places: list[int] = []
        second = choice_group.claim(1, lambda count: (list(range(count)), places.append))
        assert (second, choice_group.is_complete) == (0, False)

    play(scenario)


def test_other_indices_and_other_ids_are_other_generations() -> None:
    async def scenario(bench: Bench) -> None:
        third, _ = await bench.start(index=2)
        first, _ = await bench.start()
        other, _ = await bench.start(generation_id=OTHER_ID)
        assert bench.store.locate(ID) == [first, third], "by index"
        assert bench.store.locate(OTHER_ID) == [other]
        assert bench.store.locate(numbered(9)) == []

    play(scenario)


# Failures


def test_failure_while_it_is_detached_is_kept_and_an_adopter_learns_it() -> None:
    async def scenario(bench: Bench) -> Any:
        generation, running = await bench.start_detached()
        await running.fail(Failure(Reason.ENGINE_ERROR, "poison"))
        adopted = bench.store.adopt(ID, 0, 2, RecordingOwner())
        assert adopted is generation
        return adopted.outcome

    failure = play(scenario)

    assert failure.reason is Reason.ENGINE_ERROR


def test_failure_after_its_owner_has_stopped_it_changes_nothing() -> None:
    async def scenario(bench: Bench) -> None:
        owner = RecordingOwner()
        generation, _ = await bench.start(owner)
        generation.stop()
        await settle()
        # What a layer above the engine may make of a cancel.
        generation.end_with(Failure(Reason.DEADLINE_EXCEEDED, "late"))
        assert (generation.outcome, owner.outcomes) == (FinishReason.STOP, [])
        assert bench.is_known(generation)

    play(scenario)


def test_record_stays_if_the_pipeline_answers_a_stop_with_a_failure() -> None:
    """A bug: it was dropped, although its owner had not let go of it."""

    async def fails_when_cancelled(request: Any, call: Any, sink: Any) -> Any:
        try:
            return await ManualPipeline()(request, call, sink)
        finally:
            raise Failure(Reason.DEADLINE_EXCEEDED, "late")

    async def scenario() -> None:
        async with GenerationStore(fails_when_cancelled, DetachConfig()) as store:
            generation = Generation(make_spec(), make_request(), 0, None, RecordingOwner())
            store.start(generation, make_request(), Call(request_id="r"))
            await settle()
            generation.stop()
            await settle()
            assert store.locate(ID) == [generation]

    run_clocked(scenario())


def test_bug_of_an_owner_is_logged_and_the_other_generations_go_on() -> None:
    class Broken(RecordingOwner):
        def on_ended(self, outcome: FinishReason | Failure) -> None:
            raise ValueError("bug")

    async def scenario(bench: Bench) -> None:
        _, broken = await bench.start(Broken())
        other, running = await bench.start(generation_id=OTHER_ID)
        with capture_logs() as logs:
            await broken.finish()
        assert [log["event"] for log in logs] == ["bug"]
        await running.finish()
        assert other.outcome is FinishReason.LENGTH

    play(scenario)


# Owners


def test_adoption_of_what_the_worker_does_not_have_is_refused() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.start()
        for generation_id, index in ((ID, 1), (OTHER_ID, 0)):
            with pytest.raises(Failure) as caught:
                bench.store.adopt(generation_id, index, 2, RecordingOwner())
            assert caught.value.reason is Reason.STREAM_NOT_FOUND

    play(scenario)


@pytest.mark.parametrize("epochs", [(7, 9), (9, 7)])
def test_the_highest_of_two_adoptions_wins_whichever_comes_first(epochs: tuple[int, int]) -> None:
    async def scenario(bench: Bench) -> None:
        _, running = await bench.start_detached()
        owners = {epoch: RecordingOwner() for epoch in epochs}
        for epoch in epochs:
            try:
                bench.store.adopt(ID, 0, epoch, owners[epoch])
            except Failure as failure:
                owners[epoch].on_ended(failure)
        running.give(8)
        await running.finish()
        assert (owners[9].token_ids, owners[9].reasons) == ([8], [FinishReason.LENGTH])
        assert (owners[7].token_ids, owners[7].reasons) == ([], [Reason.TAKEN_OVER])

    play(scenario)


def test_owner_that_has_been_replaced_cannot_let_go() -> None:
    async def scenario(bench: Bench) -> None:
        former, new = RecordingOwner(), RecordingOwner()
        generation, _ = await bench.start(former)
        bench.store.adopt(ID, 0, 2, new)
        bench.store.let_go(generation, former)
        assert (generation.owner, bench.store.detached_count) == (new, 0)

    play(scenario)


# Grace


@pytest.mark.parametrize(("asked_s", "limit_s", "given_s"), [(30, 300, 30), (600, 300, 300), (0, 300, 0)])
def test_what_is_detached_is_cancelled_after_the_shorter_of_its_grace_and_the_limit(
    asked_s: float, limit_s: float, given_s: float
) -> None:
    async def scenario(bench: Bench) -> None:
        generation, running = await bench.start_detached(grace_s=asked_s)
        if given_s:
            pass_time(given_s - 0.001)
            await settle()
            assert not running.is_cancelled
            pass_time(0.001)
        await settle()
        assert (running.is_cancelled, generation.ending.cause) == (True, Cause.GRACE_OVER)
        assert bench.store.locate(ID) == []
        assert bench.store.is_expired(ID)
        assert (bench.store.detached_count, bench.store.detached_bytes) == (0, 0)

    play(scenario, grace_s_max=limit_s)


def test_grace_begins_anew_each_time_an_owner_lets_go() -> None:
    async def scenario(bench: Bench) -> None:
        generation, _ = await bench.start_detached()
        pass_time(29)
        await settle()
        owner = RecordingOwner()
        bench.store.adopt(ID, 0, 2, owner)
        pass_time(100)
        await settle()
        assert bench.is_known(generation), "it has an owner"
        bench.store.let_go(generation, owner)
        pass_time(29)
        await settle()
        assert bench.is_known(generation)
        pass_time(1)
        await settle()
        assert not bench.is_known(generation)

    play(scenario)


def test_record_that_is_complete_waits_no_longer_than_one_that_runs() -> None:
    async def scenario(bench: Bench) -> None:
        generation, running = await bench.start_detached()
        pass_time(20)
        await running.finish()
        assert bench.is_known(generation)
        pass_time(10)
        await settle()
        assert not bench.is_known(generation)
        assert bench.store.is_expired(ID)

    play(scenario)


def test_answer_whose_grace_ends_before_it_is_adopted_has_expired() -> None:
    """A bug: a frontend that had just found it was told that there was none. Found by seed 624 of the simulation."""

    async def scenario(bench: Bench) -> Reason:
        await bench.start_detached()
        pass_time(100)
        await settle()
        with pytest.raises(Failure) as caught:
            bench.store.adopt(ID, 0, 2, RecordingOwner())
        return caught.value.reason

    assert play(scenario) is Reason.STREAM_EXPIRED


def test_an_answer_that_is_dropped_for_another_reason_has_not_expired() -> None:
    async def scenario(bench: Bench) -> bool:
        generation, _ = await bench.start()
        bench.store.drop(generation, Cause.SIGNAL)
        return bench.store.is_expired(ID)

    assert play(scenario) is False


def test_number_of_expired_answers_that_are_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EXPIRED_KEPT", 2)

    async def scenario(bench: Bench) -> list[bool]:
        for number in (0, 1, 2, 1, 3):
            await bench.start_detached(generation_id=numbered(number), grace_s=1)
            pass_time(1)
            await settle()
        return [bench.store.is_expired(numbered(number)) for number in range(4)]

    assert play(scenario) == [False, True, False, True], "the last two, by the time of their latest expiry"


# Bounds


def test_beyond_the_number_of_records_the_oldest_that_has_ended_is_dropped() -> None:
    async def scenario(bench: Bench) -> None:
        oldest, _ = await bench.start_detached(generation_id=numbered(0))
        ended = []
        for number in (1, 2):
            generation, running = await bench.start_detached(generation_id=numbered(number))
            await running.finish()
            ended.append(generation)
        await bench.start_detached(generation_id=numbered(3))
        assert [bench.is_known(one) for one in (oldest, *ended)] == [True, False, True]
        assert bench.store.is_expired(numbered(1))
        assert bench.store.detached_count == 3

    play(scenario, records_max=3)


def test_beyond_the_number_of_records_the_oldest_is_dropped_if_none_has_ended() -> None:
    async def scenario(bench: Bench) -> None:
        first, running = await bench.start_detached(generation_id=numbered(0))
        second, _ = await bench.start_detached(generation_id=numbered(1))
        await settle()
        assert (bench.is_known(first), bench.is_known(second)) == (False, True)
        assert (running.is_cancelled, first.ending.cause) == (True, Cause.GRACE_OVER)

    play(scenario, records_max=1)


def test_tokens_of_detached_generations_count_and_what_exceeds_the_size_is_dropped() -> None:
    async def scenario(bench: Bench) -> None:
        first, running = await bench.start_detached(generation_id=numbered(0))
        second, _ = await bench.start_detached(generation_id=numbered(1))
        running.give(*range(10))
        assert bench.store.detached_bytes == first.size + second.size == 2 * 8 + 40
        running.give(*range(10))
        assert (bench.is_known(first), bench.is_known(second)) == (False, True)
        assert bench.store.detached_bytes == second.size

    play(scenario, bytes_max=60)


def test_owned_generations_are_not_bounded() -> None:
    async def scenario(bench: Bench) -> None:
        generations = [await bench.start(generation_id=numbered(number)) for number in range(5)]
        generations[0][1].give(*range(100))
        assert all(bench.is_known(one) for one, _ in generations)
        assert (bench.store.detached_count, bench.store.detached_bytes) == (0, 0)

    play(scenario, records_max=1, bytes_max=10)


def test_tokens_that_follow_a_drop_change_no_account() -> None:
    async def scenario(bench: Bench) -> None:
        generation, running = await bench.start_detached()
        bench.store.drop(generation, Cause.SIGNAL)
        running.give(7, 8)  # The rest of a step, before the task is cancelled.
        await settle()
        assert (bench.store.detached_bytes, bench.store.detached_count) == (0, 0)

    play(scenario)


def test_nothing_is_left_on_the_account_once_all_have_an_owner_or_are_gone() -> None:
    async def scenario(bench: Bench) -> int:
        _, one_runs = await bench.start_detached(generation_id=numbered(0))
        _, two_runs = await bench.start_detached(generation_id=numbered(1), grace_s=1)
        _, three_runs = await bench.start_detached(generation_id=numbered(2))
        for running in (one_runs, two_runs, three_runs):
            running.give(7, 8)
        bench.store.adopt(numbered(0), 0, 2, RecordingOwner())
        one_runs.give(9)
        pass_time(1)
        await settle()
        bench.store.cancel(numbered(2))
        return bench.store.detached_bytes

    assert play(scenario) == 0


def test_counts_of_detached_generations_tell_those_that_run() -> None:
    async def scenario(bench: Bench) -> None:
        _, running = await bench.start_detached(generation_id=numbered(0))
        await bench.start_detached(generation_id=numbered(1))
        await bench.start(generation_id=numbered(2))
        await running.finish()
        assert (bench.store.detached_count, bench.store.detached_running_count) == (2, 1)
        assert bench.store.running_count == 2

    play(scenario)


# Cancels by id, and the worker's stop


def test_cancel_by_id_ends_all_choices_and_counts_those_that_ran() -> None:
    """A bug: a choice that some frontend owned went on, so that a cancel through a load balancer often did nothing."""

    async def scenario(bench: Bench) -> None:
        detached, _ = await bench.start_detached(index=0)
        _, ended_runs = await bench.start_detached(index=1)
        await ended_runs.finish()
        owner = RecordingOwner()
        owned, _ = await bench.start(owner, index=2)
        other, _ = await bench.start(generation_id=OTHER_ID)
        assert bench.store.cancel(ID) == 2
        assert (bench.store.locate(ID), bench.store.locate(OTHER_ID)) == ([], [other])
        assert [detached.ending.cause, owned.ending.cause] == [Cause.EXPLICIT] * 2
        assert owner.reasons == [Reason.CANCELLED]
        assert not bench.store.is_expired(ID)
        assert bench.store.cancel(ID) == 0

    play(scenario)


def test_the_stop_of_the_worker_ends_all_tasks_and_timers() -> None:
    async def scenario() -> None:
        bench = Bench()
        async with bench.store:
            owned, owned_runs = await bench.start()
            detached, detached_runs = await bench.start_detached(generation_id=OTHER_ID)
            timer = detached.timer
        assert (owned_runs.is_cancelled, detached_runs.is_cancelled) == (True, True)
        assert (owned.ending.cause, detached.ending.cause) == (Cause.DRAIN, Cause.DRAIN)
        assert timer is not None
        assert timer.cancelled()
        assert bench.store.locate(ID) == bench.store.locate(OTHER_ID) == []

    run_clocked(scenario())


# All of it at random


class Plane:
    """Two answers of two choices each, to which anything may happen in any order."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._epoch = 1
        self._running: dict[Generation, Running] = {}

    @property
    def known(self) -> list[Generation]:
        return [one for number in range(2) for one in self._bench.store.locate(numbered(number))]

    async def do(self, what: str, number: int, index: int) -> None:
        store = self._bench.store
        generation = next((one for one in store.locate(numbered(number)) if one.index == index), None)
        if what == "submit":
            started, running = await self._bench.start(generation_id=numbered(number), index=index, epoch=self._epoch)
            self._running[started] = running
        elif what == "pass time":
            pass_time(number * 20)
        elif generation is not None:
            await self._to(what, generation)
        await settle()
        self.check()

    async def _to(self, what: str, generation: Generation) -> None:
        store, running = self._bench.store, self._running[generation]
        is_running = not running.is_cancelled and not running.ended.done()
        match what:
            case "tokens" if is_running:
                running.give(*range(7))
            case "finish" if is_running:
                await running.finish()
            case "fail" if is_running:
                await running.fail(Failure(Reason.ENGINE_ERROR, "poison"))
            case "let go" if generation.owner is not store:
                store.let_go(generation, generation.owner)
            case "adopt":
                self._epoch += 1
                store.adopt(generation.spec.id, generation.index, self._epoch, RecordingOwner())
            case "stop" if generation.owner is not store:
                generation.stop()
            case "cancel" if generation.owner is not store:
                store.drop(generation, Cause.SIGNAL)
            case "cancel by id":
                store.cancel(generation.spec.id)

    def check(self) -> None:
        store = self._bench.store
        detached = [one for one in self.known if one.owner is store]
        assert store.detached_count == len(detached) <= 3
        assert store.detached_bytes == sum(one.size for one in detached) <= 60
        assert store.detached_running_count == sum(one.outcome is None for one in detached)
        assert all((one.timer is not None) == (one in detached) for one in self.known)
        for generation, running in self._running.items():
            if generation not in self.known or generation.outcome is not None:
                assert running.is_cancelled or running.ended.done(), "the engine works for nobody"


OFTEN = ("submit", "tokens", "let go", "adopt") * 3
WHAT = (*OFTEN, "finish", "fail", "stop", "cancel", "cancel by id", "pass time")
STEPS = st.lists(st.tuples(st.sampled_from(WHAT), st.integers(0, 1), st.integers(0, 1)), min_size=20, max_size=40)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_accounts_and_engine_agree_with_the_records_whatever_happens(steps: list[tuple[str, int, int]]) -> None:
    async def scenario(bench: Bench) -> None:
        plane = Plane(bench)
        for step in steps:
            await plane.do(*step)
        pass_time(1000)
        await settle()
        plane.check()
        assert (bench.store.detached_count, bench.store.detached_bytes) == (0, 0)

    play(scenario, records_max=3, bytes_max=60)
