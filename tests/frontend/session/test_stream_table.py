"""Streams of a session: opened for requests and their choices, closed by either end, each id used once."""

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from services.core.call import Attempt, Call
from services.core.choice_group import ChoiceGroup
from services.core.errors import Failure, Reason
from services.core.generation.kept import Copy, Generation, Kept
from services.core.request import FinishReason
from services.frontend.session.session import WorkerSession
from services.frontend.session.stream import Stream
from services.frontend.session.stream_table import ADOPTION_S_MAX, COMPLETED_KEPT, COMPLETION_S_MAX
from services.frontend.session.writer import CancelCounts
from services.stubs import worker_pb2
from services.stubs.inference_pb2 import FINISH_REASON_STOP
from tests.frontend.session.support import PATIENT, failure_of
from tests.frontend.support import BareWorker
from tests.support.clock import pass_time, run_clocked
from tests.support.doubles import Collected, RecordingAttempt, fill, make_request, run_async


def join(bare: BareWorker, choice: int, choice_group: ChoiceGroup) -> tuple[Stream, Collected]:
    """Open the stream of one choice of a group."""
    collected = Collected()
    call = Call(request_id="r", choice_group=choice_group)
    return bare.session.open(make_request(choice=choice), call, collected), collected


def test_cancels_of_running_streams_and_late_tokens_are_counted() -> None:
    async def scenario() -> None:
        bare = BareWorker()
        ended, cancelled = bare.open(), bare.open()
        bare.finish(ended.id)
        for stream in (ended, cancelled, cancelled):
            bare.session.close(stream)
        bare.tokens(cancelled.id, 0, 7, 8, 9)
        assert bare.cancels == CancelCounts(signals=1, late_tokens=3)

    run_async(scenario())


def test_ids_are_assigned_in_order_and_never_reused() -> None:
    async def scenario() -> None:
        bare = BareWorker()
        first, second = bare.open(), bare.open()
        bare.session.close(second)
        bare.finish(first.id)
        assert [first.id, second.id, bare.open().id] == [1, 2, 3]

    run_async(scenario())


def test_items_for_a_closed_stream_are_ignored_and_items_after_a_completed_one_are_a_violation() -> None:
    async def scenario() -> None:
        bare = BareWorker()
        closed, completed = bare.open(), bare.open()
        bare.session.close(closed)
        bare.finish(completed.id)

        bare.finish(closed.id)
        bare.tokens(closed.id, 0, 7)
        assert not bare.session.is_lost

        bare.finish(completed.id)
        assert bare.session.is_lost

    run_async(scenario())


@pytest.mark.parametrize(("stream_id", "is_lost"), [(1, False), (2, True)], ids=["forgotten", "remembered"])
def test_number_of_completed_ids_that_are_remembered_is_bounded(stream_id: int, is_lost: bool) -> None:
    async def scenario() -> bool:
        bare = BareWorker()
        for _ in range(COMPLETED_KEPT + 1):
            bare.finish(bare.open().id)
        bare.finish(stream_id)
        return bare.session.is_lost

    assert run_async(scenario()) is is_lost


def test_attempt_that_closes_other_streams_at_a_goaway_disturbs_nothing() -> None:
    async def scenario() -> None:
        bare = BareWorker()
        streams: list[Stream] = []

        class Closing(Attempt):
            def on_leaving(self, grace_s: float) -> None:
                for stream in streams:
                    bare.session.close(stream)

        streams += [bare.open(attempt=Closing()), bare.open(attempt=Closing())]
        with capture_logs() as logs:
            bare.hear(goaway=worker_pb2.GoAway())

        assert bare.candidate.in_flight_count == 0
        assert logs == [], "no bug is logged"

    run_async(scenario())


# A finish reason without `complete_final`


def finish_without_marker(bare: BareWorker, *stream_ids: int) -> None:
    bare.hear(ends=[worker_pb2.StreamEnd(stream_id=one, finish_reason=FINISH_REASON_STOP) for one in stream_ids])


def test_stream_that_never_gets_complete_final_ends_well_after_the_bound_and_is_cancelled() -> None:
    async def scenario() -> None:
        bare = BareWorker(config=PATIENT)
        stream = bare.open()
        await bare.sent()
        finish_without_marker(bare, stream.id)
        finished_at = asyncio.get_running_loop().time()

        assert bare.session.check(finished_at + COMPLETION_S_MAX - 0.5) == finished_at + COMPLETION_S_MAX
        assert not stream.ended.done()
        with capture_logs() as logs:
            bare.session.check(finished_at + COMPLETION_S_MAX)

        assert (await stream.ended).reason is FinishReason.STOP
        assert [(log["log_level"], log["stream_id"]) for log in logs] == [("warning", stream.id)]
        assert (await bare.sent()).cancels == [stream.id]
        assert bare.candidate.in_flight_count == 0
        bare.finish(stream.id)
        assert not bare.session.is_lost, "a late marker is ignored"

    run_clocked(scenario())


def test_bound_of_each_stream_counts_from_its_own_finish_reason() -> None:
    async def scenario() -> None:
        bare = BareWorker(config=PATIENT)
        first, second, running = bare.open(), bare.open(), bare.open()
        finish_without_marker(bare, first.id)
        pass_time(1)
        finish_without_marker(bare, second.id)
        now = asyncio.get_running_loop().time()

        due = bare.session.check(now - 1 + COMPLETION_S_MAX)

        assert [one.ended.done() for one in (first, second, running)] == [True, False, False]
        assert due == now + COMPLETION_S_MAX

    run_clocked(scenario())


@pytest.mark.parametrize("end", ["completed", "closed", "lost"])
def test_stream_that_ended_in_time_is_not_ended_again(end: str) -> None:
    async def scenario() -> None:
        bare = BareWorker(config=PATIENT)
        stream = bare.open()
        finish_without_marker(bare, stream.id)
        if end == "completed":
            bare.hear(ends=[worker_pb2.StreamEnd(stream_id=stream.id, complete_final=True)])
        elif end == "closed":
            bare.session.close(stream)
        else:
            bare.vanish()
        signals = bare.cancels.signals

        with capture_logs() as logs:
            bare.session.check(asyncio.get_running_loop().time() + COMPLETION_S_MAX)

        assert logs == []
        assert bare.cancels.signals == signals

    run_clocked(scenario())


def test_choice_that_has_not_joined_ends_well_as_well_and_gets_its_end_when_it_joins() -> None:
    async def scenario() -> None:
        bare, choice_group = BareWorker(config=PATIENT), ChoiceGroup(2)
        join(bare, 0, choice_group)
        finish_without_marker(bare, 2)
        bare.session.check(asyncio.get_running_loop().time() + COMPLETION_S_MAX)
        second, _ = join(bare, 1, choice_group)
        assert (await second.ended).reason is FinishReason.STOP
        assert bare.candidate.in_flight_count == 1

    run_clocked(scenario())


# Choice groups


def test_first_choice_sends_one_message_for_all_and_the_others_join() -> None:
    async def scenario() -> None:
        bare, choice_group = BareWorker(), ChoiceGroup(3)
        streams = [join(bare, choice, choice_group)[0] for choice in (2, 0, 1)]

        [submit] = (await bare.sent()).submits
        assert (submit.stream_id, submit.choices, submit.request.choice) == (1, 3, 0)
        assert [stream.id for stream in streams] == [3, 1, 2]
        alone = bare.open()
        assert (alone.id, (await bare.sent()).submits[0].choices) == (4, 1)

    run_async(scenario())


def test_all_choices_of_a_group_count_as_in_flight_from_the_first_message_on() -> None:
    async def scenario() -> None:
        bare = BareWorker(slots=2, places=2)
        join(bare, 0, ChoiceGroup(3))
        assert bare.candidate.in_flight_count == 3
        assert not bare.candidate.capacity.is_full()
        assert bare.candidate.capacity.is_full(2)

    run_async(scenario())


def test_items_for_a_choice_that_has_not_joined_wait_for_it() -> None:
    async def scenario() -> None:
        bare, choice_group = BareWorker(), ChoiceGroup(2)
        join(bare, 0, choice_group)
        bare.begin(1, 2)
        bare.tokens(2, 0, 7, 8)
        bare.tokens(2, 2, 9)
        bare.finish(2)

        collected, attempt = Collected(), RecordingAttempt()
        call = Call(request_id="r", choice_group=choice_group, attempt=attempt)
        stream = bare.session.open(make_request(choice=1), call, collected)

        assert (await stream.ended).reason is FinishReason.STOP
        assert [(delta.choice, list(delta.token_ids)) for delta in collected.deltas] == [(1, [7, 8]), (1, [9])]
        assert (attempt.begun_count, attempt.has_begun) == (1, True)

    run_async(scenario())


def test_choice_that_was_refused_before_it_joined_gets_the_refusal_when_it_joins() -> None:
    async def scenario() -> None:
        bare, choice_group = BareWorker(), ChoiceGroup(2)
        first, _ = join(bare, 0, choice_group)
        bare.refuse(1, 2)
        second, _ = join(bare, 1, choice_group)
        assert [await failure_of(first), await failure_of(second)] == [Reason.WORKER_AT_CAPACITY] * 2

    run_async(scenario())


@pytest.mark.parametrize(("says", "signals"), [("nothing", 2), ("refused", 0), ("lost", 0)])
def test_reserved_stream_that_no_choice_joins_is_cancelled_if_the_worker_still_has_it(says: str, signals: int) -> None:
    async def scenario() -> None:
        complaints: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        bare, choice_group = BareWorker(), ChoiceGroup(3)
        first, _ = join(bare, 0, choice_group)
        await bare.sent()
        if says == "refused":
            bare.refuse(1, 2, 3)
        elif says == "lost":
            bare.vanish()

        choice_group.release()

        assert bare.cancels.signals == signals
        assert bare.candidate.in_flight_count == (1 if says == "nothing" else 0)
        if says == "nothing":
            assert (await bare.sent()).cancels == [2, 3]
        else:
            assert isinstance(first.ended.exception(), Failure)
        gc.collect()
        assert complaints == []

    run_async(scenario())


def test_choice_that_joins_after_the_loss_fails_and_its_reserved_stream_leaves_nothing() -> None:
    async def scenario() -> None:
        bare, choice_group = BareWorker(), ChoiceGroup(2)
        first, _ = join(bare, 0, choice_group)
        bare.vanish()
        with pytest.raises(Failure) as caught:
            join(bare, 1, choice_group)
        assert caught.value.reason is Reason.CANNOT_CONNECT
        assert await failure_of(first) is Reason.DISCONNECTED
        choice_group.release()
        assert bare.cancels.signals == 0

    run_async(scenario())


def test_all_choices_of_a_request_that_is_too_large_fail_and_leave_nothing() -> None:
    async def scenario() -> None:
        bare, choice_group = BareWorker(), ChoiceGroup(2)
        large = make_request(range(2**28, 2**28 + 2_000_000))
        for choice in (0, 1):
            with pytest.raises(Failure) as caught:
                bare.session.open(
                    replace(large, choice=choice), Call(request_id="r", choice_group=choice_group), Collected()
                )
            assert caught.value.reason is Reason.INVALID_ARGUMENT
        assert bare.candidate.in_flight_count == 0

    run_async(scenario())


# Answers that outlive this frontend


def kept_call(attempt: Attempt | None = None, *, token_count: int = 0, is_over: bool = False, **fields: Any) -> Call:
    """`token_count`, `is_over`: of the record, as its worker has said."""
    generation = Generation(b"a" * 16, 30.0, is_told=True)
    generation.epoch = 2**40
    attempt = attempt or Attempt()
    attempt.adopts = Copy(session="i#1", token_count=token_count, is_over=is_over, discard=lambda: None)
    return Call(request_id="r", kept=Kept(generation=generation, **fields), attempt=attempt)


def test_adopted_stream_gets_the_record_from_the_clients_own_tokens_on_and_its_end() -> None:
    async def scenario() -> None:
        bare, collected, attempt = BareWorker(), Collected(), RecordingAttempt()
        request = make_request(generated_token_ids=(5, 6), choice=1)
        call = kept_call(attempt, first_index=4)
        stream = bare.session.adopt(request, call, collected)
        sent = await bare.sent()
        assert sent.adopts == [worker_pb2.Adopt(stream_id=stream.id, generation_id=b"a" * 16, index=5, epoch=2**40)]
        assert not sent.submits
        assert bare.candidate.in_flight_count == 1

        bare.begin(stream.id)
        bare.tokens(stream.id, 2, 7, 8)
        bare.finish(stream.id)

        assert (await stream.ended).reason is FinishReason.STOP
        assert collected.token_ids == [7, 8]
        assert attempt.begun_count == 1
        assert bare.candidate.in_flight_count == 0

    run_clocked(scenario())


def test_adoption_on_a_lost_session_cannot_be_connected() -> None:
    async def scenario() -> None:
        bare = BareWorker()
        bare.vanish()
        with pytest.raises(Failure) as caught:
            bare.session.adopt(make_request(), kept_call(), Collected())
        assert caught.value.reason is Reason.CANNOT_CONNECT

    run_clocked(scenario())


def test_record_that_begins_elsewhere_than_the_clients_tokens_end_breaks_the_protocol() -> None:
    async def scenario() -> None:
        bare = BareWorker()
        stream = bare.session.adopt(make_request(generated_token_ids=(5, 6)), kept_call(), Collected())
        bare.tokens(stream.id, 0, 5, 6, 7)
        assert await failure_of(stream) is Reason.PROTOCOL_VIOLATION
        assert not bare.session.is_lost

    run_clocked(scenario())


class Adopting:
    """An adopted stream whose worker has said that it has three tokens of it, and on a clock that the test controls."""

    def __init__(self, *, is_over: bool = False, token_count: int = 3) -> None:
        self.bare = BareWorker(config=PATIENT)
        call = kept_call(token_count=token_count, is_over=is_over)
        self.stream = self.bare.session.adopt(make_request(), call, Collected())

    def wait(self, seconds: float) -> float:
        """Let time pass, and look. Returns when to look again."""
        pass_time(seconds)
        return self.bare.session._streams.check(asyncio.get_running_loop().time())


def test_adopted_record_of_which_nothing_comes_fails_its_stream_and_is_cancelled() -> None:
    async def scenario() -> None:
        adopting = Adopting()
        adopting.bare.begin(adopting.stream.id)
        assert adopting.wait(ADOPTION_S_MAX - 1) == ADOPTION_S_MAX
        assert not adopting.stream.ended.done()
        adopting.wait(1)
        assert await failure_of(adopting.stream) is Reason.STALLED
        assert list((await adopting.bare.sent()).cancels) == [adopting.stream.id]
        assert not adopting.bare.session.is_lost

    run_clocked(scenario())


def test_adopted_record_may_take_longer_while_parts_of_it_come() -> None:
    async def scenario() -> None:
        adopting = Adopting()
        for position in range(2):
            adopting.bare.tokens(adopting.stream.id, position, 7)
            adopting.wait(ADOPTION_S_MAX - 1)
        assert not adopting.stream.ended.done()
        adopting.wait(ADOPTION_S_MAX)
        assert await failure_of(adopting.stream) is Reason.STALLED

    run_clocked(scenario())


@pytest.mark.parametrize("is_over", [True, False])
def test_end_of_an_adopted_record_is_awaited_only_if_it_has_ended(is_over: bool) -> None:
    async def scenario() -> bool:
        adopting = Adopting(is_over=is_over)
        adopting.bare.tokens(adopting.stream.id, 0, 7, 8, 9)
        adopting.wait(0)
        adopting.wait(ADOPTION_S_MAX)
        has_failed = adopting.stream.ended.done()
        if has_failed:
            assert await failure_of(adopting.stream) is Reason.STALLED
        return has_failed

    assert run_clocked(scenario()) is is_over


def test_record_without_tokens_may_wait_in_the_queue_of_its_worker() -> None:
    async def scenario() -> bool:
        adopting = Adopting(token_count=0)
        adopting.wait(100 * ADOPTION_S_MAX)
        return adopting.stream.ended.done()

    assert run_clocked(scenario()) is False


def test_frontend_that_was_late_itself_waits_anew() -> None:
    async def scenario() -> bool:
        adopting = Adopting()
        pass_time(ADOPTION_S_MAX)
        adopting.bare.session.forgive(asyncio.get_running_loop().time())
        adopting.wait(ADOPTION_S_MAX - 1)
        return adopting.stream.ended.done()

    assert run_clocked(scenario()) is False


def test_discarded_generation_is_taken_over_and_then_cancelled() -> None:
    async def scenario() -> None:
        bare = BareWorker()
        bare.session.generations.discard(b"a" * 16, 3, 9)
        adoption, cancel = [one for one in bare.session._writer.pop_messages() if one.ByteSize()]
        (adopt,) = adoption.adopts
        assert (adopt.generation_id, adopt.index, adopt.epoch) == (b"a" * 16, 3, 9)
        assert list(cancel.cancels) == [adopt.stream_id]
        assert bare.open().id > adopt.stream_id, "no id is used twice"

        bare.tokens(adopt.stream_id, 0, 7)
        bare.refuse(adopt.stream_id, reason=Reason.TAKEN_OVER)

        assert not bare.session.is_lost, "what the worker says of it is ignored"
        assert bare.cancels.late_tokens == 1

    run_clocked(scenario())


def test_stream_that_is_stopped_frees_its_room_and_gets_nothing_more() -> None:
    async def scenario() -> None:
        bare = BareWorker(slots=1, places=0)
        stream = bare.open()
        assert bare.candidate.capacity.is_full()
        bare.session.stop(stream)
        assert not bare.candidate.capacity.is_full()
        bare.tokens(stream.id, 0, 7)
        assert bare.cancels == CancelCounts(signals=1, late_tokens=1)
        assert not bare.session.is_lost

    run_clocked(scenario())


def test_stream_that_is_let_go_of_is_no_signal_and_gets_nothing_more() -> None:
    async def scenario() -> None:
        bare = BareWorker()
        stream = bare.open()
        await bare.sent()
        bare.session.let_go(stream)
        bare.session.close(stream)
        sent = await bare.sent()
        assert (list(sent.detaches), list(sent.cancels)) == ([stream.id], [])
        bare.tokens(stream.id, 0, 7)
        bare.finish(stream.id)
        assert not bare.session.is_lost
        assert bare.cancels.signals == 0
        assert bare.candidate.in_flight_count == 0

    run_clocked(scenario())


def test_stream_that_has_ended_can_still_be_let_go_of() -> None:
    async def scenario() -> None:
        bare = BareWorker()
        stream = bare.open()
        await bare.sent()
        bare.finish(stream.id)
        bare.session.let_go(stream)
        assert list((await bare.sent()).detaches) == [stream.id]
        assert bare.candidate.in_flight_count == 0

    run_clocked(scenario())


@pytest.mark.parametrize(("leave", "frees_room"), [(WorkerSession.stop, True), (WorkerSession.let_go, False)])
def test_worker_that_refused_a_request_has_room_again_after_a_stop_alone(
    leave: Callable[[WorkerSession, Stream], None], frees_room: bool
) -> None:
    """What is let go of keeps its slot."""

    async def scenario() -> bool:
        bare = BareWorker()
        stream = bare.open()
        fill(bare.candidate)
        leave(bare.session, stream)
        return bare.candidate.capacity.is_full()

    assert run_clocked(scenario()) is not frees_room
