"""Execute: every way a request can end releases its slot, and positions count from the first token of the answer."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest
from structlog.testing import capture_logs

from services.core.call import Call, Cause, Ending, Phase
from services.core.choice_group import ChoiceGroup
from services.core.common_layers import Accept, Deadline
from services.core.errors import Failure, Reason
from services.core.gate import Gate
from services.core.interface import Delta, Usage
from services.core.request import FinishReason, Request
from services.worker.dispatcher import Limits
from services.worker.engine import Output
from services.worker.execute import ATTACH, Execute
from tests.support.clock import pass_time, run_clocked, settle
from tests.support.doubles import Collected, call_layer, make_request, run_async
from tests.support.manual_worker import ManualEngine

T = TypeVar("T")


class Case:
    """An Execute layer over an engine that the test steps, and the requests sent to it."""

    def __init__(self, group: asyncio.TaskGroup, limits: Limits) -> None:
        self.engine = ManualEngine()
        self.execute = Execute(self.engine, limits)
        self.engine.attach(self.execute.emit)
        self._group = group

    @property
    def counts(self) -> tuple[int, int]:
        return self.execute.running_count, self.execute.waiting_count

    @property
    def cancelled(self) -> dict[tuple[Cause, Phase], int]:
        return dict(self.execute.counters.cancelled)

    def send(self, prompt: int, call: dict[str, Any] | None = None, **fields: Any) -> asyncio.Task[Collected | Failure]:
        """Send a request. Its prompt is one token, which identifies it."""
        return self._group.create_task(self._send(make_request(prompt=(prompt,), **fields), call or {}))

    async def _send(self, request: Request, call: dict[str, Any]) -> Collected | Failure:
        try:
            return await call_layer(Deadline(self.execute), request, **call)
        except Failure as failure:
            return failure

    def send_group(self, prompt: int, count: int, **call: Any) -> list[asyncio.Task[Collected | Failure]]:
        """Send the choices of one request, numbered from 5."""
        choice_group = ChoiceGroup(count, first=5)
        return [self.send(prompt, {"choice_group": choice_group, **call}, choice=5 + number) for number in range(count)]

    def key(self, prompt: int) -> int:
        return self.engine.key_of((prompt,))

    def running(self) -> list[int]:
        return [request.prompt_token_ids[0] for request in self.engine.requests.values()]

    def finish(self, prompt: int) -> None:
        self.engine.give(self.key(prompt), [7], FinishReason.STOP)


def play(scenario: Callable[[Case], Awaitable[T]], slots: int = 1, places: int = 1, **limits: Any) -> T:
    async def run() -> T:
        async with asyncio.TaskGroup() as group:
            case = Case(group, Limits(slots=slots, places=places, **limits))
            result = await scenario(case)
        assert case.counts == (0, 0), "a slot or a place leaked"
        assert case.engine.requests == {}, "the engine still has requests"
        on_engine = sum(
            number for (_, phase), number in case.cancelled.items() if phase in (Phase.PREFILL, Phase.RUNNING)
        )
        assert case.execute.counters.aborted == on_engine
        return result

    return run_clocked(run())


def test_tokens_reach_the_sink_with_their_positions_and_usage_counts_them() -> None:
    async def scenario(case: Case) -> Any:
        sent = case.send(1, choice=2)
        await settle()
        case.engine.give(case.key(1), [7, 8])
        case.engine.give(case.key(1), [9], FinishReason.STOP)
        return await sent

    result = play(scenario)

    assert [(delta.position, list(delta.token_ids), delta.choice) for delta in result.deltas] == [
        (0, [7, 8], 2),
        (2, [9], 2),
    ]
    assert result.finish.reason is FinishReason.STOP
    assert result.finish.usage == Usage(1, 3)


def test_positions_and_usage_of_a_continued_request_include_its_generated_tokens() -> None:
    async def scenario(case: Case) -> Any:
        sent = case.send(1, generated_token_ids=(5, 6))
        await settle()
        assert case.engine.submitted[0].generated_token_ids == (5, 6)
        case.engine.give(case.key(1), [7], FinishReason.LENGTH)
        return await sent

    result = play(scenario)

    assert result.deltas[0].position == 2
    assert result.finish.usage == Usage(1, 3)


def test_finish_without_a_token_delivers_nothing() -> None:
    async def scenario(case: Case) -> Any:
        sent = case.send(1)
        await settle()
        case.engine.give(case.key(1), [], FinishReason.STOP)
        return await sent

    result = play(scenario)

    assert result.deltas == []
    assert result.finish.usage == Usage(1, 0)


def test_waiting_requests_start_in_order_of_arrival_when_a_slot_becomes_free() -> None:
    async def scenario(case: Case) -> list[list[int]]:
        tasks = [case.send(prompt) for prompt in (1, 2, 3)]
        order = []
        for task in tasks:
            await settle()
            order.append(case.running())
            case.engine.give(case.key(case.running()[0]), [7], FinishReason.STOP)
            await task
        return order

    assert play(scenario, slots=1, places=2) == [[1], [2], [3]]


def test_request_beyond_the_limits_is_refused_and_never_reaches_the_engine() -> None:
    async def scenario(case: Case) -> Any:
        tasks = [case.send(prompt) for prompt in (1, 2)]
        refused = await case.send(3)
        assert case.execute.counters.refused == 1
        assert [request.prompt_token_ids for request in case.engine.submitted] == [(1,)]
        for task in tasks:
            task.cancel()
        return refused

    assert play(scenario).reason is Reason.WORKER_AT_CAPACITY


def test_engine_failure_follows_its_tokens_and_frees_the_slot() -> None:
    failure, collected = Failure(Reason.ENGINE_ERROR, "poison"), Collected()

    async def ask(case: Case) -> None:
        with pytest.raises(Failure) as caught:
            await case.execute(make_request(prompt=(1,)), Call(request_id="r"), collected)
        assert caught.value is failure

    async def scenario(case: Case) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(ask(case))
            await settle()
            case.engine.step(Output(case.key(1), [7], failure=failure))

    play(scenario)

    assert collected.token_ids == [7]


def test_cancelled_running_request_leaves_the_engine_and_the_next_one_starts() -> None:
    async def scenario(case: Case) -> list[int]:
        first, second = case.send(1), case.send(2)
        await settle()
        first.cancel()
        await settle()
        running = case.running()
        second.cancel()
        return running

    assert play(scenario) == [2]


def test_cancelled_waiting_request_never_reaches_the_engine_and_frees_its_place() -> None:
    async def scenario(case: Case) -> list[tuple[int, ...]]:
        first, second = case.send(1), case.send(2)
        await settle()
        second.cancel()
        await settle()
        assert case.counts == (1, 0)
        third = case.send(3)
        await settle()
        assert case.counts == (1, 1)
        first.cancel()
        await settle()
        third.cancel()
        return [request.prompt_token_ids for request in case.engine.submitted]

    assert play(scenario) == [(1,), (3,)]


def test_running_and_waiting_requests_may_be_cancelled_at_once() -> None:
    async def scenario(case: Case) -> None:
        tasks = [case.send(prompt) for prompt in range(6)]
        await settle()
        for task in tasks:
            task.cancel()

    play(scenario, slots=2, places=4)


@pytest.mark.parametrize("position", ["running", "waiting"])
@pytest.mark.parametrize(
    ("refusal", "reason"),
    [
        (Failure(Reason.PROMPT_TOO_LONG, "too long"), Reason.PROMPT_TOO_LONG),
        (ZeroDivisionError("a bug"), Reason.ENGINE_ERROR),
    ],
)
def test_exception_at_submission_fails_only_that_request(position: str, refusal: Exception, reason: Reason) -> None:
    async def scenario(case: Case) -> Any:
        if position == "waiting":
            first = case.send(1)
            await settle()
            sent = case.send(2)
            await settle()
            case.engine.refusal = refusal
            case.engine.give(case.key(1), [7], FinishReason.STOP)
            await first
        else:
            case.engine.refusal = refusal
            sent = case.send(2)
        failure = await sent
        after = case.send(3)
        await settle()
        assert case.running() == [3]
        after.cancel()
        return failure

    assert play(scenario).reason is reason


def test_refusal_by_the_engine_is_counted_as_refused() -> None:
    async def scenario(case: Case) -> int:
        case.engine.refusal = Failure(Reason.WORKER_AT_CAPACITY, "full")
        await case.send(1)
        return case.execute.counters.refused

    assert play(scenario) == 1


def test_slot_is_released_even_if_the_engines_cancel_raises() -> None:
    async def ask(case: Case) -> None:
        with pytest.raises(ZeroDivisionError):
            await call_layer(case.execute, make_request(prompt=(1,)))

    async def scenario(case: Case) -> None:
        case.engine.cancel_bug = ZeroDivisionError("a bug")
        async with asyncio.TaskGroup() as group:
            group.create_task(ask(case))
            await settle()
            case.engine.give(case.key(1), [7], FinishReason.STOP)

    play(scenario)


class BrokenSink:
    """A sink that raises."""

    def deliver(self, delta: Delta) -> None:
        raise ZeroDivisionError("a bug")


def test_bug_in_a_sink_fails_only_its_request() -> None:
    """Such an exception once propagated into the engine's loop and ended the engine and all requests."""

    async def ask_broken(case: Case) -> Failure:
        with pytest.raises(Failure) as caught:
            await case.execute(make_request(prompt=(1,)), Call(request_id="broken"), BrokenSink())
        return caught.value

    async def scenario(case: Case) -> tuple[Failure, Any]:
        async with asyncio.TaskGroup() as group:
            broken = group.create_task(ask_broken(case))
            whole = case.send(2)
            await settle()
            case.engine.step(Output(case.key(1), [7]), Output(case.key(2), [8]))
            case.engine.give(case.key(2), [9], FinishReason.STOP)
            return await broken, await whole

    with capture_logs() as logs:
        failure, whole = play(scenario, slots=2)

    assert failure.reason is Reason.INTERNAL
    assert whole.token_ids == [8, 9]
    assert [(line["event"], line["request_id"]) for line in logs] == [("bug", "broken")]


def test_outputs_after_the_end_are_ignored() -> None:
    async def scenario(case: Case) -> Any:
        sent = case.send(1)
        await settle()
        key = case.key(1)
        case.engine.give(key, [7], FinishReason.STOP)
        case.engine.give(key, [8])
        result = await sent
        case.engine.give(key, [9])
        return result

    assert play(scenario).token_ids == [7]


def test_fail_all_ends_running_and_waiting_requests() -> None:
    async def scenario(case: Case) -> list[Any]:
        tasks = [case.send(prompt) for prompt in (1, 2, 3)]
        await settle()
        case.execute.fail_all(Failure(Reason.ENGINE_DEAD, "dead"))
        failures = [await task for task in tasks]
        assert case.cancelled == {}, "no request was cancelled"
        return failures

    failures = play(scenario, slots=2, places=1)

    assert [failure.reason for failure in failures] == [Reason.ENGINE_DEAD] * 3
    assert len(set(map(id, failures))) == 3, "a shared failure would collect the tracebacks of all"


def test_engine_never_has_more_than_n_requests_and_all_are_answered() -> None:
    async def scenario(case: Case) -> tuple[int, list[int]]:
        tasks = [case.send(prompt) for prompt in range(10)]
        await settle()
        while case.engine.requests:
            key = next(iter(case.engine.requests))
            case.engine.give(key, [case.engine.requests[key].prompt_token_ids[0]], FinishReason.STOP)
            await settle()
        results = [await task for task in tasks]
        answered = [result.token_ids[0] for result in results if isinstance(result, Collected)]
        return case.engine.running_count_max, answered

    assert play(scenario, slots=3, places=7) == (3, list(range(10)))


def test_first_of_two_causes_in_one_turn_is_counted() -> None:
    async def scenario(case: Case) -> dict[tuple[Cause, Phase], int]:
        ending = Ending()
        sent = case.send(1, {"ending": ending})
        await settle()
        ending.fail(Failure(Reason.CANCELLED, "by its request id"), Cause.EXPLICIT)
        case.execute.fail_all(Failure(Reason.DRAINING, "the worker leaves"), Cause.DRAIN)
        await sent
        return case.cancelled

    assert play(scenario) == {(Cause.EXPLICIT, Phase.PREFILL): 1}


def test_request_cancelled_before_it_used_its_slot_does_not_shorten_the_service_time() -> None:
    """When a frontend died with a full queue, the others were once told to retry at once."""

    async def scenario(case: Case) -> float | None:
        tasks = [*(case.send(prompt) for prompt in range(1, 5)), *case.send_group(5, 2)]
        await settle()
        pass_time(8)
        for task in tasks:
            task.cancel()
        await settle()
        return case.execute.service_time_s

    assert play(scenario, slots=1, places=5) == 8.0


# Waiting


@pytest.mark.parametrize("late_s", [0, 5])
def test_request_that_has_waited_for_wait_s_is_refused_and_never_reaches_the_engine(late_s: float) -> None:
    async def scenario(case: Case) -> Any:
        first, second = case.send(1), case.send(2)
        await settle()
        pass_time(29)
        await settle()
        assert case.counts == (1, 1)
        pass_time(1 + late_s)
        failure = await second
        case.finish(1)
        await first
        counters = case.execute.counters
        assert (counters.queue_timeouts, counters.queue_deadlines, counters.refused) == (1, 0, 0)
        assert [request.prompt_token_ids for request in case.engine.submitted] == [(1,)]
        assert case.cancelled == {}
        return failure

    failure = play(scenario, wait_s=30.0)

    assert failure.reason is Reason.WORKER_AT_CAPACITY
    assert failure.detail == "waited 30 s for a slot of a worker at capacity"
    assert (failure.metadata["cause"], failure.metadata["queue_timeout_s"]) == ("queue_timeout", "30")
    assert (failure.metadata["running"], failure.metadata["waiting"]) == ("1", "0")


def test_request_whose_deadline_passes_while_waiting_never_reaches_the_engine() -> None:
    async def scenario(case: Case) -> Any:
        first, second = case.send(1), case.send(2, {"deadline": 10.0})
        await settle()
        pass_time(10)
        failure = await second
        case.finish(1)
        await first
        counters = case.execute.counters
        assert (counters.queue_timeouts, counters.queue_deadlines) == (0, 1)
        assert [request.prompt_token_ids for request in case.engine.submitted] == [(1,)]
        assert case.cancelled == {(Cause.DEADLINE, Phase.QUEUED): 1}
        return failure

    assert play(scenario).reason is Reason.DEADLINE_EXCEEDED


@pytest.mark.parametrize(
    ("call", "wait_s", "reason"),
    [({"deadline": 10.0}, 99.0, Reason.DEADLINE_EXCEEDED), ({}, 10.0, Reason.WORKER_AT_CAPACITY)],
)
def test_slot_freed_before_a_late_timer_fires_goes_to_the_next_request_in_time(
    call: dict[str, Any], wait_s: float, reason: Reason
) -> None:
    """In a late loop, callbacks that are already scheduled run before the timers of the same turn."""

    async def scenario(case: Case) -> Any:
        first, second = case.send(1), case.send(2, call)
        await settle()
        pass_time(5)
        third = case.send(3)
        await settle()
        pass_time(5)
        case.finish(1)  # The first request leaves in this turn; the timer fires at the end of the turn.
        await settle()
        assert [request.prompt_token_ids for request in case.engine.submitted] == [(1,), (3,)]
        case.finish(3)
        await first
        await third
        return await second

    assert play(scenario, places=2, wait_s=wait_s).reason is reason


def test_request_past_its_deadline_fails_with_that_reason_when_its_slot_becomes_free() -> None:
    async def scenario(case: Case) -> Failure:
        async def ask_alone() -> Failure:
            with pytest.raises(Failure) as caught:
                await call_layer(case.execute, make_request(prompt=(2,)), deadline=10.0)
            return caught.value

        first = case.send(1)
        await settle()
        async with asyncio.TaskGroup() as group:
            second = group.create_task(ask_alone())
            await settle()
            pass_time(10)
            case.finish(1)
            await first
        return second.result()

    assert play(scenario).reason is Reason.DEADLINE_EXCEEDED


def test_request_that_arrives_after_its_deadline_takes_no_place() -> None:
    async def scenario(case: Case) -> Any:
        pass_time(10)
        failure = await case.send(1, {"deadline": 10.0})
        assert case.engine.submitted == []
        assert case.cancelled == {(Cause.DEADLINE, Phase.QUEUED): 1}
        assert case.execute.counters.queue_deadlines == 0, "the request never was in the queue"
        return failure

    assert play(scenario).reason is Reason.DEADLINE_EXCEEDED


def test_only_waiting_requests_have_a_timer() -> None:
    async def scenario(case: Case) -> list[int]:
        loop: Any = asyncio.get_running_loop()
        counts = []

        async def count() -> None:
            await settle()
            counts.append(sum(not timer.cancelled() for timer in loop._scheduled))

        tasks = []
        for prompt in (1, 2, 3):
            tasks.append(case.send(prompt))
            await count()
        case.finish(1)
        await count()
        tasks[2].cancel()
        await count()
        case.finish(2)
        return counts

    assert play(scenario, places=2) == [0, 1, 2, 1, 0]


def test_wait_from_arrival_to_slot_is_observed() -> None:
    async def scenario(case: Case) -> dict[str, float]:
        first, second, third = case.send(1), case.send(2), case.send(3)
        await settle()
        third.cancel()
        pass_time(0.2)
        case.finish(1)
        await first
        await settle()
        case.finish(2)
        await second
        (metric,) = case.execute.counters.wait_s.collect()
        return {sample.labels.get("le", sample.name): sample.value for sample in metric.samples}

    seen = play(scenario, places=2)

    assert (seen["0.0"], seen["0.1"], seen["0.25"], seen["+Inf"]) == (1, 1, 2, 2)
    assert seen["dynamo_work_handler_permit_wait_seconds_sum"] == pytest.approx(0.2)


def test_request_that_starts_at_once_is_observed_with_a_wait_of_zero() -> None:
    async def scenario() -> float:
        engine = ManualEngine()
        execute = Execute(engine, Limits(slots=1, places=0))
        engine.attach(execute.emit)
        async with asyncio.TaskGroup() as group:
            group.create_task(call_layer(execute, make_request(prompt=(1,))))
            await engine.wait_submitted(1)
            engine.give(engine.key_of((1,)), [7], FinishReason.STOP)
        (metric,) = execute.counters.wait_s.collect()
        return next(sample.value for sample in metric.samples if sample.labels.get("le") == "0.0")

    assert run_async(scenario()) == 1


def test_deadline_takes_precedence_over_the_bound_on_waiting() -> None:
    """The client once got a deadline failure while a queue timeout was counted."""

    async def scenario(case: Case) -> Any:
        first, second = case.send(1), case.send(2, {"deadline": 11.0})
        await settle()
        pass_time(12)
        failure = await second
        first.cancel()
        assert (case.execute.counters.queue_timeouts, case.execute.counters.queue_deadlines) == (0, 1)
        return failure

    assert play(scenario, wait_s=10.0).reason is Reason.DEADLINE_EXCEEDED


def test_refusal_has_a_retry_time_derived_from_the_service_time() -> None:
    async def scenario(case: Case) -> Any:
        tasks = [case.send(1), case.send(2)]
        await settle()
        pass_time(3)
        case.finish(1)
        await settle()
        tasks.append(case.send(3))
        failure = await case.send(4)
        for task in tasks:
            task.cancel()
        return failure

    failure = play(scenario)

    assert failure.retry_after_s == 2 * 3.0
    assert failure.metadata == {
        "cause": "capacity",
        "engine_request_limit": "1",
        "request_queue_limit": "1",
        "running": "1",
        "waiting": "1",
    }


def test_waiting_tokens_of_a_continued_request_include_its_generated_tokens() -> None:
    async def scenario(case: Case) -> list[Any]:
        first = case.send(1)
        await settle()
        seen: list[Any] = [await case.send(2, generated_token_ids=(7,) * 4)]
        fits = case.send(3, generated_token_ids=(7,) * 3)
        await settle()
        seen.append(case.counts)
        for task in (first, fits):
            task.cancel()
        return seen

    failure, counts = play(scenario, tokens=4)

    assert (failure.reason, failure.metadata["queue_token_limit"]) == (Reason.WORKER_AT_CAPACITY, "4")
    assert counts == (1, 1)


# Several choices


def test_choices_of_a_group_get_slots_and_places_together_in_order() -> None:
    async def scenario(case: Case) -> list[int]:
        choices = case.send_group(1, 3)
        await settle()
        counts = case.counts
        assert counts == (2, 1)
        alone = case.send(2)
        await settle()
        order = []
        while case.engine.requests:
            key = next(iter(case.engine.requests))
            order.append(case.engine.requests[key].choice)
            case.engine.give(key, [7], FinishReason.STOP)
            await settle()
        for task in [*choices, alone]:
            assert isinstance(await task, Collected)
        return order

    assert play(scenario, slots=2, places=2) == [5, 6, 7, 0]


def test_group_without_enough_room_is_refused_as_a_whole() -> None:
    async def scenario(case: Case) -> list[Any]:
        first = case.send(1)
        await settle()
        failures = [await task for task in case.send_group(2, 3)]
        assert case.counts == (1, 0)
        assert case.execute.counters.refused == 3
        assert len(case.engine.submitted) == 1
        first.cancel()
        return failures

    failures = play(scenario, slots=2, places=1)

    assert [failure.reason for failure in failures] == [Reason.WORKER_AT_CAPACITY] * 3
    assert {failure.metadata["running"] for failure in failures} == {"1"}


def test_group_larger_than_n_plus_q_is_an_invalid_argument() -> None:
    async def scenario(case: Case) -> list[Any]:
        return [await task for task in case.send_group(1, 4)]

    failures = play(scenario, slots=2, places=1)

    assert [(failure.reason, failure.param) for failure in failures] == [(Reason.INVALID_ARGUMENT, "n")] * 4


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("gone", [{5}, {6}, {7}, {5, 6}, {6, 7}, {5, 6, 7}])
def test_reservations_of_choices_that_never_arrive_are_released_when_they_leave(gone: set[int], slots: int) -> None:
    """`leave` may be called before or after the other choices arrive."""

    async def scenario(case: Case) -> None:
        for is_early in (True, False):
            choice_group = ChoiceGroup(3, first=5)
            if is_early:
                for choice in gone:
                    choice_group.leave(choice)
            coming = [
                case.send(1, {"choice_group": choice_group}, choice=choice)
                for choice in (5, 6, 7)
                if choice not in gone
            ]
            await settle()
            for choice in gone:
                choice_group.leave(choice)
            assert sum(case.counts) == 3 - len(gone)
            for task in coming:
                await settle()
                case.finish(1)
                await task

    play(scenario, slots=slots, places=3 - slots)


def test_choice_that_fails_at_once_does_not_affect_the_others() -> None:
    """The engine refuses the first choice before the second has arrived."""

    async def scenario(case: Case) -> Any:
        case.engine.refusal = Failure(Reason.ENGINE_ERROR, "no")
        first, second = case.send_group(1, 2)
        failure = await first
        await settle()
        case.finish(1)
        assert isinstance(await second, Collected)
        return failure

    assert play(scenario, slots=1, places=1).reason is Reason.ENGINE_ERROR


def test_each_choice_is_cancelled_separately() -> None:
    async def scenario(case: Case) -> list[int]:
        choices = case.send_group(1, 3)
        await settle()
        choices[0].cancel()
        await settle()
        choices[2].cancel()
        await settle()
        left = [request.choice for request in case.engine.requests.values()]
        case.finish(1)
        await choices[1]
        return left

    assert play(scenario, slots=1, places=2) == [6]


# Early ends, by cause and phase


@pytest.mark.parametrize(("endpoint", "cause"), [("generate", Cause.CLIENT_DISCONNECT), (ATTACH, Cause.SESSION_LOST)])
def test_hang_up_is_counted_by_cause_and_phase(endpoint: str, cause: Cause) -> None:
    async def scenario(case: Case) -> dict[tuple[Cause, Phase], int]:
        running, prefilling, queued = [case.send(prompt, {"endpoint": endpoint}) for prompt in (1, 2, 3)]
        await settle()
        case.engine.give(case.key(1), [7])
        for task in (running, prefilling, queued):
            task.cancel()
            task.cancel()
        await settle()
        assert (case.execute.counters.aborted, case.execute.counters.queue_deadlines) == (2, 0)
        return case.cancelled

    assert play(scenario, slots=2) == {(cause, Phase.RUNNING): 1, (cause, Phase.PREFILL): 1, (cause, Phase.QUEUED): 1}


def test_request_that_was_never_submitted_is_not_cancelled_on_the_engine() -> None:
    async def scenario(case: Case) -> None:
        first, second = case.send(1), case.send(2)
        await settle()
        case.engine.cancel_bug = AssertionError("this request was never submitted")
        second.cancel()
        await settle()
        assert second.cancelled()
        case.engine.cancel_bug = None
        first.cancel()

    play(scenario)


def test_hang_up_in_the_moment_of_the_finish_is_not_an_early_end() -> None:
    async def scenario(case: Case) -> dict[tuple[Cause, Phase], int]:
        sent = case.send(1)
        await settle()
        case.finish(1)
        sent.cancel()
        await settle()
        return case.cancelled

    assert play(scenario) == {}


def test_deadline_is_counted_by_its_cause() -> None:
    async def scenario(case: Case) -> dict[tuple[Cause, Phase], int]:
        sent = case.send(1, {"deadline": 10.0})
        await settle()
        case.engine.give(case.key(1), [7])
        pass_time(10)
        failure = await sent
        assert isinstance(failure, Failure)
        assert failure.reason is Reason.DEADLINE_EXCEEDED
        assert case.execute.counters.queue_deadlines == 0
        return case.cancelled

    assert play(scenario) == {(Cause.DEADLINE, Phase.RUNNING): 1}


def test_handed_over_requests_are_counted_as_drained() -> None:
    async def scenario(case: Case) -> dict[tuple[Cause, Phase], int]:
        tasks = [case.send(1), case.send(2)]
        await settle()
        case.execute.fail_all(Failure(Reason.DRAINING, "leaving"), Cause.DRAIN)
        for task in tasks:
            failure = await task
            assert isinstance(failure, Failure)
            assert failure.reason is Reason.DRAINING
        return case.cancelled

    assert play(scenario) == {(Cause.DRAIN, Phase.PREFILL): 1, (Cause.DRAIN, Phase.QUEUED): 1}


@pytest.mark.parametrize("cause", [Cause.EXPLICIT, Cause.SLOW_CLIENT])
def test_early_end_from_outside_is_counted_by_its_cause(cause: Cause) -> None:
    async def scenario(case: Case) -> dict[tuple[Cause, Phase], int]:
        gate, ending = Gate(), Ending()
        accept = Accept(case.execute, gate)

        async def ask() -> None:
            with pytest.raises(Failure):
                await call_layer(accept, make_request(prompt=(1,)), ending=ending)

        async with asyncio.TaskGroup() as group:
            group.create_task(ask())
            await settle()
            ending.fail(Failure(Reason.CANCELLED, "over"), cause)
        return case.cancelled

    assert play(scenario) == {(cause, Phase.PREFILL): 1}


def test_signal_is_not_counted_again_at_the_end() -> None:
    async def scenario(case: Case) -> dict[tuple[Cause, Phase], int]:
        ending = Ending()
        sent = case.send(1, {"ending": ending, "endpoint": ATTACH})
        await settle()
        ending.cause = Cause.SIGNAL
        case.execute.counters.cancelled[Cause.SIGNAL, Phase.PREFILL] += 1
        sent.cancel()
        await settle()
        assert case.execute.counters.aborted == 1
        return case.cancelled

    assert play(scenario) == {(Cause.SIGNAL, Phase.PREFILL): 1}


@pytest.mark.parametrize(("finish", "counted"), [(None, {(Cause.INTERNAL, Phase.RUNNING): 1}), (FinishReason.STOP, {})])
def test_bug_while_delivering_a_token_is_an_abort_unless_it_was_the_last(
    finish: FinishReason | None, counted: dict[tuple[Cause, Phase], int]
) -> None:
    async def ask_broken(case: Case) -> None:
        with pytest.raises(Failure):
            await case.execute(make_request(prompt=(1,)), Call(request_id="broken"), BrokenSink())

    async def scenario(case: Case) -> dict[tuple[Cause, Phase], int]:
        async with asyncio.TaskGroup() as group:
            group.create_task(ask_broken(case))
            await settle()
            case.engine.step(Output(case.key(1), [7], finish))
        return case.cancelled

    with capture_logs():
        assert play(scenario) == counted
