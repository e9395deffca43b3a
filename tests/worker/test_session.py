"""The worker's end of a session carries all requests of one frontend, and none outlives it."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
from structlog.testing import capture_logs

from services.core.call import Call, Cause, Phase
from services.core.common_layers import Accept, Deadline, Guard
from services.core.errors import Failure, Reason
from services.core.gate import Gate
from services.core.interface import Delta, Finish, Layer, Sink, TokenLogprobs
from services.core.request import FinishReason, Request
from services.core.tenant import EVERYBODY
from services.core.validation import CHOICES_MAX
from services.rpc.codec import card_from_wire, seconds_from_wire, seconds_to_wire
from services.rpc.framing import FrameConnection
from services.rpc.step import read_entries
from services.stubs import inference_pb2, worker_pb2
from services.worker import session as session_module
from services.worker.counters import Counters
from services.worker.dispatcher import Limits
from services.worker.engine import EngineLoad
from services.worker.execute import Execute
from services.worker.generations.store import DetachConfig, GenerationStore
from services.worker.session import FrontendSession, FrontendSessionConfig
from tests.support.clock import settle
from tests.support.doubles import CARD, Script, run_async
from tests.support.manual_worker import ManualEngine, ManualLayer, RawFrontend, Served, serving, submit
from tests.support.raw_session import RawSession, RecordingTransport, open_raw_session

DONE = Finish(FinishReason.STOP)


def play(scenario: Callable[[Served, ManualLayer], Awaitable[Any]], **config: Any) -> Any:
    async def run() -> Any:
        pipeline = ManualLayer()
        async with serving(pipeline, **config) as served:
            return await scenario(served, pipeline)

    return run_async(run())


# What a session sends


def test_only_the_first_message_has_a_welcome() -> None:
    async def scenario(served: Served, pipeline: ManualLayer) -> RawFrontend:
        frontend = served.attach()
        await frontend.read()
        await frontend.send(submit(1, 10))
        (await pipeline.wait_called(10)).ended.set_result(DONE)
        await frontend.until(lambda: frontend.end(1))
        return frontend

    first, *others = play(scenario, heartbeat_s=0.5).messages

    assert (first.welcome.instance_id, card_from_wire(first.welcome.card)) == ("w1", CARD)
    assert (first.welcome.engine_request_limit, first.welcome.request_queue_limit) == (2, 3)
    assert seconds_from_wire(first.welcome.heartbeat) == 0.5
    assert first.HasField("load")
    assert not any(message.HasField("welcome") for message in others)


@pytest.mark.parametrize("reads_columns", [True, False], ids=["in columns", "in items"])
def test_log_probabilities_are_sent_as_the_frontend_reads_them(reads_columns: bool) -> None:
    """A frontend of an earlier version does not say that it reads columns."""
    logprobs = [TokenLogprobs(-0.5, ((7, -0.5), (8, -1.5)))]

    async def scenario(served: Served, pipeline: ManualLayer) -> worker_pb2.Step:
        frontend = served.attach()
        first = worker_pb2.FrontendMessage(submits=[submit(1, 10)], reads_logprob_columns=reads_columns)
        await (await frontend.session()).send(first)
        asked = await pipeline.wait_called(10)
        asked.sink.deliver(Delta(0, [7], logprobs=logprobs))
        asked.ended.set_result(DONE)
        await frontend.until(lambda: frontend.end(1))
        [step] = [message.step for message in frontend.messages if message.HasField("step")]
        return step

    step = play(scenario)

    assert (step.HasField("logprob_columns"), bool(step.logprobs)) == (reads_columns, not reads_columns)
    assert list(read_entries(step)) == [(1, 0, [7], logprobs)]


def test_successful_stream_has_tokens_then_a_finish_reason_and_complete_final() -> None:
    async def scenario(served: Served, pipeline: ManualLayer) -> RawFrontend:
        frontend = served.attach()
        await frontend.send(submit(1, 10))
        asked = await pipeline.wait_called(10)
        asked.deliver(7, 8)
        await frontend.until(lambda: frontend.token_ids(1) == [7, 8])
        asked.deliver(9)
        asked.ended.set_result(Finish(FinishReason.LENGTH))
        await frontend.until(lambda: frontend.end(1))
        return frontend

    frontend = play(scenario)

    assert frontend.entries(1) == [(0, [7, 8]), (2, [9])]
    assert frontend.end(1) == worker_pb2.StreamEnd(
        stream_id=1, finish_reason=inference_pb2.FINISH_REASON_LENGTH, complete_final=True
    )


def test_failed_stream_has_tokens_then_an_error_without_complete_final() -> None:
    async def scenario(served: Served, pipeline: ManualLayer) -> RawFrontend:
        frontend = served.attach()
        await frontend.send(submit(1, 10))
        asked = await pipeline.wait_called(10)
        asked.deliver(7)
        asked.ended.set_exception(Failure(Reason.ENGINE_ERROR, "poison"))
        await frontend.until(lambda: frontend.end(1))
        return frontend

    frontend = play(scenario)

    assert frontend.token_ids(1) == [7]
    assert frontend.end(1) == worker_pb2.StreamEnd(
        stream_id=1, error=worker_pb2.Error(reason="ENGINE_ERROR", detail="poison")
    )


def test_several_streams_run_at_the_same_time() -> None:
    async def scenario(served: Served, pipeline: ManualLayer) -> RawFrontend:
        frontend = served.attach()
        await frontend.send(submit(1, 10), submit(2, 20))
        first, second = await pipeline.wait_called(10), await pipeline.wait_called(20)
        first.deliver(11)
        second.deliver(21, 22)
        first.deliver(12)
        second.ended.set_result(DONE)
        await frontend.until(lambda: frontend.end(2))
        first.deliver(13)
        first.ended.set_result(DONE)
        await frontend.until(lambda: frontend.end(1))
        return frontend

    frontend = play(scenario)

    assert frontend.token_ids(1) == [11, 12, 13]
    assert frontend.token_ids(2) == [21, 22]


@pytest.mark.parametrize("timeout_s", [None, 500.0])
def test_timeout_of_a_submit_becomes_the_deadline_of_its_call(timeout_s: float | None) -> None:
    async def scenario(served: Served, pipeline: ManualLayer) -> float | None:
        asked_for = submit(1, 10, request_id="r-1")
        if timeout_s is not None:
            asked_for.timeout.CopyFrom(seconds_to_wire(timeout_s))
        frontend = served.attach()
        await frontend.send(asked_for)
        call = (await pipeline.wait_called(10)).call
        assert call.request_id == "r-1"
        return None if call.deadline is None else call.deadline - asyncio.get_running_loop().time()

    left_s = play(scenario)

    assert (left_s is None) == (timeout_s is None)
    assert left_s is None or 400 < left_s <= 500


def test_end_sends_what_is_left_before_it_closes_the_session() -> None:
    async def scenario(served: Served, pipeline: ManualLayer) -> RawFrontend:
        frontend = served.attach()
        await frontend.send(submit(1, 10))
        asked = await pipeline.wait_called(10)
        asked.sink.deliver(Delta(0, [11]))
        asked.ended.set_exception(Failure(Reason.DRAINING, "handed over"))
        await asyncio.wait([asked.ended])
        await asyncio.sleep(0)  # The request's own task has taken note and put its end into the outbox.
        await served.service.end_sessions(0)
        await frontend.until_over()
        return frontend

    frontend = play(scenario)
    end = frontend.end(1)

    assert frontend.token_ids(1) == [11]
    assert end is not None
    assert end.error.reason == "DRAINING"


# Refused requests and violations of the protocol


@pytest.mark.parametrize("fields", [{"priority": 1}, {"session_id": "s"}, {"request_id": "two words"}])
def test_request_that_cannot_be_honoured_ends_with_an_error_and_the_others_go_on(fields: dict[str, Any]) -> None:
    async def scenario(served: Served, pipeline: ManualLayer) -> RawFrontend:
        frontend = served.attach()
        await frontend.send(submit(1, 10, **fields), submit(2, 20))
        (await pipeline.wait_called(20)).ended.set_result(DONE)
        await frontend.until(lambda: frontend.end(1) and frontend.end(2))
        return frontend

    frontend = play(scenario)
    refused, done = frontend.end(1), frontend.end(2)

    assert refused is not None
    assert done is not None
    assert refused.error.reason == "INVALID_ARGUMENT"
    assert done.complete_final


def test_bug_in_one_request_fails_that_request_alone_under_the_guard() -> None:
    async def scenario() -> tuple[str, bool]:
        async with serving(Guard(Script([7, ValueError("a bug")], [8]))) as served:
            frontend = served.attach()
            await frontend.send(submit(1, 10))
            failed = await frontend.until(lambda: frontend.end(1))
            await frontend.send(submit(2, 20))
            done = await frontend.until(lambda: frontend.end(2))
            return failed.error.reason, done.complete_final

    assert run_async(scenario()) == ("INTERNAL", True)


def test_message_that_cannot_be_decoded_ends_the_session() -> None:
    async def scenario(served: Served, pipeline: ManualLayer) -> None:
        frontend = served.attach()
        await frontend.send(submit(1, 10))
        asked = await pipeline.wait_called(10)
        garbled = await open_raw_session(served.address)
        await garbled.send(b"\xff")
        await garbled.until_over()
        garbled.close()
        assert not asked.cancelled.is_set(), "that was another frontend"

    play(scenario)


def test_stream_id_that_is_in_use_ends_the_session() -> None:
    async def scenario(served: Served, pipeline: ManualLayer) -> None:
        frontend = served.attach()
        await frontend.send(submit(1, 10))
        asked = await pipeline.wait_called(10)
        await frontend.send(submit(1, 20))
        await frontend.until_over()
        await asked.cancelled.wait()

    play(scenario)


def group_of(count: int, stream_id: int, prompt: int, **fields: Any) -> worker_pb2.Submit:
    message = submit(stream_id, prompt, **fields)
    message.choices = count
    return message


@pytest.mark.parametrize(
    "twice",
    [
        [submit(1, 10), group_of(2, 1, 20)],
        [group_of(3, 1, 10), submit(3, 20)],
        [group_of(3, 1, 10), group_of(2, 3, 20)],
    ],
)
def test_stream_id_that_any_choice_uses_ends_the_session(twice: list[worker_pb2.Submit]) -> None:
    async def scenario(served: Served, pipeline: ManualLayer) -> None:
        frontend = served.attach()
        await frontend.send(*twice)
        await frontend.until_over()

    play(scenario)


def test_stream_id_of_an_ended_stream_cannot_be_used_again() -> None:
    async def scenario(served: Served, pipeline: ManualLayer) -> None:
        frontend = served.attach()
        await frontend.send(submit(1, 10))
        (await pipeline.wait_called(10)).ended.set_result(DONE)
        await frontend.until(lambda: frontend.end(1))
        await frontend.send(submit(1, 20))
        await frontend.until_over()

    play(scenario)


@pytest.mark.parametrize(
    ("count", "stream_id"),
    [(CHOICES_MAX + 1, 1), (2**32 - 1, 1), (2, 2**32 - 1), (CHOICES_MAX, 2**32 - CHOICES_MAX + 1)],
)
@pytest.mark.parametrize("counted", ["stream_id", "choice"])
def test_too_many_choices_in_one_submit_end_the_session(count: int, stream_id: int, counted: str) -> None:
    async def scenario(served: Served, pipeline: ManualLayer) -> None:
        frontend = served.attach()
        ids = {"stream_id": 1} | {counted: stream_id}
        await frontend.send(group_of(count, prompt=10, **ids))
        await frontend.until_over()

    play(scenario)


@pytest.mark.parametrize("count", [7, 8])
def test_session_with_too_many_streams_is_dropped(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug: one small message with 5,000 requests of 64 choices blocked the worker for 17 s."""
    monkeypatch.setattr(session_module, "STREAMS_MAX", 2)  # Beside the 2 that run and the 3 that wait.

    async def scenario(served: Served, pipeline: ManualLayer) -> bool:
        frontend = served.attach()
        await frontend.send(group_of(4, 1, 10), submit(5, 20), group_of(count - 5, 6, 30))
        if count == 7:
            (await pipeline.wait_called(20)).ended.set_result(DONE)
            await frontend.until(lambda: frontend.end(5))
        else:
            await frontend.until_over()
        return frontend.is_over

    assert play(scenario) is (count == 8)


# Several choices


def answering(engine: ManualEngine, **config: Any) -> Any:
    """A session with the real admission of a worker, on an engine that the test steps."""
    execute = Execute(engine, Limits(slots=2, places=3))
    engine.attach(execute.emit)
    return serving(Guard(Deadline(execute)), engine=engine, execute=execute, **config)


async def until_taken_note(frontend: RawFrontend) -> None:
    """Wait until the worker has processed everything sent before: it refuses one more request."""
    await frontend.send(submit(1000, 10, priority=1))
    await frontend.until(lambda: frontend.end(1000))


async def until_ended(frontend: RawFrontend, *stream_ids: int) -> list[worker_pb2.StreamEnd]:
    return [await frontend.until(partial(frontend.end, stream_id)) for stream_id in stream_ids]


def test_every_choice_is_a_stream_with_its_own_tokens_and_end() -> None:
    async def scenario() -> Any:
        engine = ManualEngine()
        async with answering(engine) as served:
            frontend = served.attach()
            await frontend.send(group_of(3, 5, 10, choice=1))
            await engine.wait_submitted(2)
            for number in range(3):
                key = next(iter(engine.requests))
                engine.give(key, [10 + engine.requests[key].choice], FinishReason.STOP)
                await until_ended(frontend, 5 + number)
            assert sum(served.load()) == 0
            return frontend

    frontend = run_async(scenario())

    assert [frontend.token_ids(stream_id) for stream_id in (5, 6, 7)] == [[11], [12], [13]]
    assert all(stream_id in frontend.begun() for stream_id in (5, 6, 7))


def test_all_choices_end_with_the_same_error_if_there_is_no_room_for_all() -> None:
    async def scenario() -> list[Any]:
        engine = ManualEngine()
        async with answering(engine) as served:
            frontend = served.attach()
            await frontend.send(submit(1, 10), group_of(5, 2, 20))
            ends = await until_ended(frontend, *range(2, 7))
            assert served.load() == (1, 0)
            return [end.error for end in ends]

    errors = run_async(scenario())

    assert [error.reason for error in errors] == ["WORKER_AT_CAPACITY"] * 5
    assert {error.metadata["running"] for error in errors} == {"1"}


@pytest.mark.parametrize("gone", [[5], [6], [7], [5, 7], [5, 6, 7]])
@pytest.mark.parametrize("is_in_one_message", [True, False])
def test_cancelled_choice_frees_its_place_even_before_it_has_begun_and_the_others_go_on(
    gone: list[int], is_in_one_message: bool
) -> None:
    async def scenario() -> tuple[Any, tuple[int, int]]:
        engine = ManualEngine()
        async with answering(engine) as served:
            frontend = served.attach()
            if is_in_one_message:
                await frontend.send(group_of(3, 5, 10), cancels=gone)
            else:
                await frontend.send(group_of(3, 5, 10))
                await engine.wait_submitted(2)
                await frontend.send(cancels=gone)
            await until_taken_note(frontend)
            assert sum(served.load()) == 3 - len(gone)
            left = [number for number in (5, 6, 7) if number not in gone]
            for number in left:
                engine.give(next(iter(engine.requests)), [7], FinishReason.STOP)
                await until_ended(frontend, number)
            return served.execute.counters.cancelled, served.load()

    cancelled, load = run_async(scenario())

    assert {cause for cause, _ in cancelled} == {Cause.SIGNAL}
    assert (cancelled.total(), load) == (len(gone), (0, 0))


def test_request_that_is_refused_before_admission_ends_every_choice() -> None:
    async def scenario() -> list[str]:
        engine = ManualEngine()
        async with answering(engine) as served:
            frontend = served.attach()
            await frontend.send(group_of(3, 5, 10, priority=1))
            ends = await until_ended(frontend, 5, 6, 7)
            assert sum(served.load()) == 0
            return [end.error.reason for end in ends]

    assert run_async(scenario()) == ["INVALID_ARGUMENT"] * 3


def test_choice_group_whose_deadline_has_passed_takes_no_place() -> None:
    async def scenario() -> list[str]:
        engine = ManualEngine()
        async with answering(engine) as served:
            frontend = served.attach()
            late = group_of(3, 5, 10)
            late.timeout.CopyFrom(seconds_to_wire(0))
            await frontend.send(late)
            ends = await until_ended(frontend, 5, 6, 7)
            assert sum(served.load()) == 0
            assert engine.submitted == []
            return [end.error.reason for end in ends]

    assert run_async(scenario()) == ["DEADLINE_EXCEEDED"] * 3


# Signals


def test_each_cancel_counts_once_under_the_phase_of_its_stream() -> None:
    """Duplicates and unknown ids do not count. A cancel that crosses the end of its stream counts."""

    async def scenario() -> tuple[dict[Any, int], int]:
        engine = ManualEngine()
        async with answering(engine) as served:
            frontend = served.attach()
            await frontend.send(*[submit(number, 10 + number) for number in range(1, 5)])
            await engine.wait_submitted(2)
            engine.give(engine.key_of((11,)), [7])
            await frontend.send(cancels=[1, 2, 3, 1, 99])
            await engine.wait_submitted(3)
            engine.give(engine.key_of((14,)), [7], FinishReason.STOP)
            await frontend.until(lambda: frontend.end(4))
            await frontend.send(cancels=[4, 4, 1])
            await frontend.send(submit(9, 19))
            await engine.wait_submitted(4)
            engine.give(engine.key_of((19,)), [7], FinishReason.STOP)
            await frontend.until(lambda: frontend.end(9))
            return dict(served.execute.counters.cancelled), served.execute.counters.aborted

    cancelled, aborted = run_async(scenario())

    assert cancelled == {
        (Cause.SIGNAL, Phase.RUNNING): 1,
        (Cause.SIGNAL, Phase.PREFILL): 1,
        (Cause.SIGNAL, Phase.QUEUED): 1,
        (Cause.SIGNAL, Phase.ENDED): 1,
    }
    assert aborted == 2


def store_of(pipeline: Layer) -> GenerationStore:
    """The generations of a worker that has none."""
    return GenerationStore(pipeline, DetachConfig())


def unconnected(pipeline: Layer, counters: Counters) -> session_module.FrontendSession:
    """A session without a connection: the test calls it with requests and cancels."""
    config = session_module.FrontendSessionConfig(heartbeat_s=9.0)
    return session_module.FrontendSession(
        pipeline, worker_pb2.Welcome(), worker_pb2.Load, lambda: False, counters, store_of(pipeline), config
    )


def test_cancel_in_the_turn_in_which_its_stream_ends_counts_as_crossing_the_end() -> None:
    async def scenario() -> dict[Any, int]:
        counters = Counters()
        session = unconnected(Script([]), counters)
        async with asyncio.TaskGroup() as group:
            session._group = group
            session._submit(submit(1, 10))
            await asyncio.sleep(0)
            session._cancel(1)
            session._cancel(1)
        return dict(counters.cancelled)

    assert run_async(scenario()) == {(Cause.SIGNAL, Phase.ENDED): 1}


def test_cancel_and_a_cancel_by_name_in_one_turn_count_once() -> None:
    async def scenario() -> Counters:
        engine, gate = ManualEngine(), Gate()
        execute = Execute(engine, Limits(slots=1, places=0))
        session = unconnected(Accept(execute, gate), execute.counters)
        async with asyncio.TaskGroup() as group:
            session._group = group
            session._submit(submit(1, 10, request_id="r-1"))
            await engine.wait_submitted(1)
            session._cancel(1)
            gate.cancel("r-1", EVERYBODY)
        return execute.counters

    counters = run_async(scenario())

    assert dict(counters.cancelled) == {(Cause.SIGNAL, Phase.PREFILL): 1}
    assert counters.aborted == 1


def test_stream_whose_session_ends_before_its_task_started_is_counted() -> None:
    async def scenario() -> dict[Any, int]:
        counters = Counters()
        session = unconnected(Script([]), counters)
        async with asyncio.TaskGroup() as group:
            session._group = group
            session._submit(submit(1, 10))
            task = session._streams[1].task
            assert task is not None
            task.cancel()  # As when the task of the session is cancelled in the turn of the submit.
        return dict(counters.cancelled)

    assert run_async(scenario()) == {(Cause.SESSION_LOST, Phase.QUEUED): 1}


def test_number_of_ended_streams_that_a_session_remembers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "ENDED_KEPT", 2)

    async def scenario(served: Served, pipeline: ManualLayer) -> dict[Any, int]:
        frontend = served.attach()
        for number in (1, 2, 3):
            await frontend.send(submit(number, 10 + number))
            (await pipeline.wait_called(10 + number)).ended.set_result(DONE)
            await until_ended(frontend, number)
        await frontend.send(cancels=[1, 2, 3])
        await frontend.send(submit(4, 14))
        await pipeline.wait_called(14)
        return dict(served.execute.counters.cancelled)

    assert play(scenario) == {(Cause.SIGNAL, Phase.ENDED): 2}


def test_lost_session_is_counted_for_each_of_its_streams() -> None:
    async def scenario() -> dict[Any, int]:
        engine = ManualEngine()
        async with answering(engine) as served:
            frontend = served.attach()
            await frontend.send(*[submit(number, 10 + number) for number in range(1, 4)])
            await engine.wait_submitted(2)
            engine.give(engine.key_of((11,)), [7])
            (await frontend.session()).half_close()
            await frontend.until_over()
            assert (sum(served.load()), engine.requests) == (0, {})
            return dict(served.execute.counters.cancelled)

    assert run_async(scenario()) == {
        (Cause.SESSION_LOST, Phase.RUNNING): 1,
        (Cause.SESSION_LOST, Phase.PREFILL): 1,
        (Cause.SESSION_LOST, Phase.QUEUED): 1,
    }


# Hang-ups


def test_cancel_stops_one_request_and_unknown_ids_are_ignored() -> None:
    async def scenario(served: Served, pipeline: ManualLayer) -> RawFrontend:
        frontend = served.attach()
        await frontend.send(submit(1, 10), submit(2, 20))
        first, second = await pipeline.wait_called(10), await pipeline.wait_called(20)
        await frontend.send(cancels=[1, 1, 99])
        await first.cancelled.wait()
        second.deliver(7)
        second.ended.set_result(DONE)
        await frontend.until(lambda: frontend.end(2))
        return frontend

    frontend = play(scenario)

    assert frontend.token_ids(2) == [7]
    assert frontend.end(1) is None, "the frontend has forgotten the stream"


@pytest.mark.parametrize("cancels", [[1, 2, 3, 4, 5], [5, 4, 3, 2, 1]])
def test_request_that_is_cancelled_with_another_does_not_begin_in_its_slot(cancels: list[int]) -> None:
    async def scenario() -> int:
        engine = ManualEngine()
        async with answering(engine) as served:
            frontend = served.attach()
            await frontend.send(*(submit(number, number) for number in (1, 2, 3, 4, 5)))
            await engine.wait_submitted(2)
            await frontend.send(cancels=cancels)
            await until_taken_note(frontend)
            assert (served.load(), engine.requests) == ((0, 0), {})
            return len(engine.submitted)

    assert run_async(scenario()) == 2


def test_request_that_is_cancelled_before_it_began_never_begins() -> None:
    async def scenario(served: Served, pipeline: ManualLayer) -> RawFrontend:
        frontend = served.attach()
        await frontend.send(submit(1, 10), submit(2, 20), cancels=[1])
        (await pipeline.wait_called(20)).ended.set_result(DONE)
        await frontend.until(lambda: frontend.end(2))
        assert list(pipeline._calls) == [20]
        return frontend

    play(scenario)


@pytest.mark.parametrize("hang_up", [RawSession.close, RawSession.abort, RawSession.half_close])
def test_frontend_that_hangs_up_cancels_its_own_requests_alone(
    hang_up: Callable[[RawSession], None],
) -> None:
    async def scenario(served: Served, pipeline: ManualLayer) -> int:
        leaving, staying = served.attach(), served.attach()
        await leaving.send(submit(1, 10), submit(2, 20))
        await staying.send(submit(1, 30))
        asked = [await pipeline.wait_called(prompt) for prompt in (10, 20, 30)]
        asked[0].deliver(7)
        hang_up(await leaving.session())
        await asked[0].cancelled.wait()
        await asked[1].cancelled.wait()
        assert not asked[2].cancelled.is_set()
        asked[2].ended.set_result(DONE)
        await staying.until(lambda: staying.end(1))
        return served.session_count

    assert play(scenario) == 1


# Leaving


def test_goaway_reaches_present_and_later_sessions() -> None:
    async def scenario(served: Served, pipeline: ManualLayer) -> list[float]:
        here = served.attach()
        await here.read()
        served.service.goaway(2.5)
        await here.until(lambda: here.messages[-1].HasField("goaway"))
        late = served.attach()
        await late.read()
        assert late.messages[0].HasField("welcome")
        assert here.messages[-1].HasField("load"), "a frontend stays if it could adopt something"
        return [seconds_from_wire(one.messages[-1].goaway.grace) for one in (here, late)]

    assert play(scenario) == [2.5, 2.5]


@pytest.mark.parametrize(
    ("is_leaving", "why"), [(True, "this worker leaves"), (False, "the frontend closed it, or is gone")]
)
def test_log_says_which_end_closed_the_session(is_leaving: bool, why: str) -> None:
    """A bug: the log said that the frontend left, although the worker had told it to leave."""

    async def scenario(served: Served, pipeline: ManualLayer) -> None:
        frontend = served.attach()
        await frontend.read()
        if is_leaving:
            served.service.goaway(2.5)
        (await frontend.session()).half_close()
        await frontend.until_over()

    with capture_logs() as logs:
        play(scenario)

    assert [line["why"] for line in logs if line["event"] == "session over"] == [why]


# Heartbeats


def test_load_is_reported_at_every_heartbeat_while_a_stream_runs() -> None:
    async def scenario(served: Served, pipeline: ManualLayer) -> worker_pb2.Load:
        frontend = served.attach()
        await frontend.send(submit(1, 10))
        await frontend.until(lambda: sum(message.HasField("load") for message in frontend.messages) == 4)
        return frontend.messages[-1].load

    load = play(scenario, heartbeat_s=0.01, idle_heartbeats=10**9)

    assert (load.engine_steps, load.ranks[0].kv_blocks_total) == (7, 9)


def test_load_is_reported_at_every_heartbeat_while_another_frontend_has_streams() -> None:
    """Otherwise a frontend takes a worker for busy for seconds after the requests of another frontend have ended."""

    async def scenario() -> worker_pb2.Load:
        engine = ManualEngine()
        execute = Execute(engine, Limits(slots=2, places=3))
        async with serving(execute, engine=engine, execute=execute, heartbeat_s=0.01, idle_heartbeats=10**9) as served:
            busy, onlooker = served.attach(), served.attach()
            await busy.send(submit(1, 10))
            await onlooker.until(lambda: sum(message.load.running for message in onlooker.messages) == 3)
            return onlooker.messages[-1].load

    assert run_async(scenario()).running == 1


def test_load_is_reported_once_more_after_the_last_stream_has_ended() -> None:
    """Otherwise the last load counts until the next report, which is rare without streams."""

    async def scenario(served: Served, pipeline: ManualLayer) -> None:
        frontend = served.attach()
        await frontend.send(submit(1, 10))
        await frontend.until(lambda: sum(message.HasField("load") for message in frontend.messages) == 2)
        await frontend.send(cancels=[1])
        await (await pipeline.wait_called(10)).cancelled.wait()
        so_far = len(frontend.messages)
        await frontend.until(lambda: any(message.HasField("load") for message in frontend.messages[so_far:]))

    play(scenario, heartbeat_s=0.01, idle_heartbeats=10**9)


async def _load_after_end(frontend: RawFrontend) -> None:
    await frontend.until(lambda: frontend.end(1))
    after = next(number for number, message in enumerate(frontend.messages, start=1) if message.ends)
    await frontend.until(lambda: any(message.HasField("load") for message in frontend.messages[after:]))


def test_load_follows_a_stream_that_ended_between_two_heartbeats() -> None:
    """A bug: the frontend, which expects a report within a heartbeat of a stream's start, took the load for unknown."""

    async def scenario(served: Served, pipeline: ManualLayer) -> None:
        frontend = served.attach()
        await frontend.send(submit(1, 10))
        (await pipeline.wait_called(10)).ended.set_result(DONE)
        await _load_after_end(frontend)

    play(scenario, heartbeat_s=0.1, idle_heartbeats=10**9)


def test_load_that_travels_with_the_last_end_is_followed_by_another() -> None:
    """The frontend reads it before the end, while the worker is in use, and so believes it for a shorter time."""

    async def scenario(served: Served, pipeline: ManualLayer) -> None:
        frontend = served.attach()
        await frontend.send(submit(1, 10))
        asked = await pipeline.wait_called(10)
        asked.ended.set_result(DONE)
        await asyncio.sleep(0)
        time.sleep(0.06)  # noqa: ASYNC251 (the heartbeat comes in the turn in which the stream is forgotten)
        await _load_after_end(frontend)

    play(scenario, heartbeat_s=0.05, idle_heartbeats=10**9)


def test_busy_worker_reports_one_load_for_each_heartbeat() -> None:
    """The number of requests that begin and end between two heartbeats changes nothing."""

    async def scenario(served: Served, pipeline: ManualLayer) -> tuple[int, float]:
        frontend = served.attach()
        began = asyncio.get_running_loop().time()
        for number in range(1, 101):
            await frontend.send(submit(number, number))
            (await pipeline.wait_called(number)).ended.set_result(DONE)
            await frontend.until(partial(frontend.end, number))
        count = sum(message.HasField("load") for message in frontend.messages)
        return count, asyncio.get_running_loop().time() - began

    count, took_s = play(scenario, heartbeat_s=0.05, idle_heartbeats=10**9)

    assert count <= 1 + took_s / 0.05


def test_idle_worker_reports_its_load_rarely() -> None:
    async def scenario(served: Served, pipeline: ManualLayer) -> float:
        frontend = served.attach()
        await frontend.read()
        began = asyncio.get_running_loop().time()
        await frontend.until(lambda: len(frontend.messages) == 4)
        return asyncio.get_running_loop().time() - began

    # Two whole intervals at least: the first may have begun before the welcome was read.
    assert play(scenario, heartbeat_s=0.01, idle_heartbeats=5) > 2 * 5 * 0.01


def test_idle_worker_computes_no_load_that_it_does_not_report() -> None:
    """Otherwise each of its sessions costs it a message at every heartbeat."""

    class CountingEngine(ManualEngine):
        load_count = 0

        def load(self) -> EngineLoad:
            self.load_count += 1
            return super().load()

    async def scenario() -> int:
        engine = CountingEngine()
        async with serving(ManualLayer(), engine=engine, heartbeat_s=0.01, idle_heartbeats=5) as served:
            frontend = served.attach()
            await frontend.until(lambda: sum(message.HasField("load") for message in frontend.messages) == 4)
            return engine.load_count

    assert run_async(scenario()) == 4


def test_silent_frontend_counts_as_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "SILENCE_S_MAX", 0.2)

    async def scenario(served: Served, pipeline: ManualLayer) -> bool:
        silent, lively = served.attach(), served.attach()
        await silent.send(submit(1, 10))
        asked = await pipeline.wait_called(10)
        while not asked.cancelled.is_set():
            await lively.send()  # An empty message is a keepalive.
            await lively.read()
        await silent.until_over()
        return lively.is_over

    with capture_logs() as logs:
        assert not play(scenario, heartbeat_s=0.01)

    assert "the frontend was silent for 0.2 s" in [line.get("why") for line in logs]


def test_worker_that_stood_still_itself_drops_no_frontend_for_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """It could hear no frontend meanwhile."""
    monkeypatch.setattr(session_module, "SILENCE_S_MAX", 0.1)

    async def scenario(served: Served, pipeline: ManualLayer) -> bool:
        frontend = served.attach()
        await frontend.send(submit(1, 10))
        asked = await pipeline.wait_called(10)
        time.sleep(0.2)  # noqa: ASYNC251 (it is what happens)
        for _ in range(3):
            await frontend.read()  # Another heartbeat.
            await frontend.send()
        return asked.cancelled.is_set()

    assert not play(scenario, heartbeat_s=0.01)


# One message for the tokens and their end


def test_end_travels_with_the_last_tokens() -> None:
    async def scenario() -> list[worker_pb2.WorkerMessage]:
        engine = ManualEngine()
        async with answering(engine) as served:
            frontend = served.attach()
            await frontend.send(submit(1, 10))
            await engine.wait_submitted(1)
            await frontend.until(lambda: frontend.begun() == [1])
            engine.give(engine.key_of((10,)), [7, 8], FinishReason.STOP)
            await frontend.until(lambda: frontend.end(1))
            return list(frontend.messages)

    last = run_async(scenario())[-1]

    assert (list(last.step.token_ids), last.ends[0].complete_final) == ([7, 8], True)


# Frontends that do not read


@pytest.mark.parametrize("count", [10, 11])
def test_frontend_may_leave_exactly_the_bound_unread(count: int) -> None:
    async def scenario(served: Served, pipeline: ManualLayer) -> bool:
        frontend = served.attach()
        await frontend.send(submit(1, 10))
        asked = await pipeline.wait_called(10)
        asked.deliver(*range(count))
        if count > 10:
            await asked.cancelled.wait()
            await frontend.until_over()
        else:
            await frontend.until(lambda: frontend.token_ids(1))
        return frontend.is_over

    assert play(scenario, outbox_tokens_max=10) is (count > 10)


def test_unsent_messages_are_sent_as_soon_as_the_frontend_reads_on() -> None:
    async def scenario() -> None:
        pipeline, config = Script(), FrontendSessionConfig(heartbeat_s=60)
        session = FrontendSession(
            pipeline, worker_pb2.Welcome(), worker_pb2.Load, lambda: False, Counters(), store_of(pipeline), config
        )
        connection, wire = FrameConnection(worker_pb2.FrontendMessage, is_opener=False), RecordingTransport()
        connection.connection_made(wire)
        serving_it = asyncio.ensure_future(session.serve(connection))
        await settle()
        connection.pause_writing()
        session.goaway(1.0)
        await settle()
        written = wire.written
        assert len(wire.pieces) == 1, "only the welcome is sent"

        connection.resume_writing()
        await settle()

        assert len(wire.written) > len(written)
        serving_it.cancel()
        await asyncio.wait([serving_it])

    run_async(scenario())


def test_frontend_that_submits_and_reads_nothing_is_dropped() -> None:
    async def scenario() -> None:
        refused = Script(*[[Reason.WORKER_AT_CAPACITY]] * 1000)
        async with serving(refused, outbox_tokens_max=100) as served:
            frontend = served.attach()
            await frontend.send(*[submit(number, 10) for number in range(1000)])
            await frontend.until_over()

    run_async(scenario())


def test_frontend_that_reads_nothing_is_dropped_while_a_write_waits() -> None:
    """A bug: the bound was checked only between writes, so a frontend that read nothing filled the worker's memory."""
    delivered = 0

    async def flood(request: Request, call: Call, sink: Sink) -> Finish:
        nonlocal delivered
        try:
            while True:
                sink.deliver(Delta(delivered, [2**32 - 1] * 1000))
                delivered += 1000
                await asyncio.sleep(0)
        finally:
            stopped.set()

    stopped = asyncio.Event()

    async def scenario() -> int:
        async with serving(flood, outbox_tokens_max=100_000) as served:
            slow, quick = served.attach(), served.attach()
            await quick.read()
            await slow.send(submit(1, 10))
            await stopped.wait()
            served.service.goaway(1)  # Another frontend's session is unharmed.
            await quick.until(lambda: quick.messages[-1].HasField("goaway"))
            await slow.until_over()
            return served.session_count

    assert run_async(scenario()) == 1
