"""Execute: a request gives its slot back on every way out, and its positions count from the first token of all."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest
from structlog.testing import capture_logs

from services.errors import Failure, Reason
from services.request import Call, Delta, FinishReason, Request, Usage
from services.worker.dispatcher import Limits
from services.worker.engine import Output
from services.worker.execute import Execute
from tests.support import Collected, call_layer, make_request, run_async
from tests.worker.support import ManualEngine

T = TypeVar("T")


class Case:
    """Execute over an engine that the test steps, and the requests on it."""

    def __init__(self, group: asyncio.TaskGroup, slots: int, places: int) -> None:
        self.engine = ManualEngine()
        self.execute = Execute(self.engine, Limits(slots=slots, places=places))
        self.engine.attach(self.execute.emit)
        self._group = group

    @property
    def counts(self) -> tuple[int, int]:
        return self.execute.running_count, self.execute.waiting_count

    def ask(self, prompt: int, **fields: Any) -> asyncio.Task[Collected | Failure]:
        """A request whose prompt is one token, by which the test knows it."""
        return self._group.create_task(self._ask(make_request(prompt=(prompt,), **fields)))

    async def _ask(self, request: Request) -> Collected | Failure:
        try:
            return await call_layer(self.execute, request)
        except Failure as failure:
            return failure

    def key(self, prompt: int) -> int:
        return self.engine.key_of((prompt,))

    def running(self) -> list[int]:
        return [request.prompt_token_ids[0] for request in self.engine.requests.values()]


async def settle() -> None:
    """Until all that is ready has run: nothing here waits for anything but the loop's next turns."""
    for _ in range(5):
        await asyncio.sleep(0)


def play(scenario: Callable[[Case], Awaitable[T]], slots: int = 1, places: int = 1) -> T:
    async def run() -> T:
        async with asyncio.TaskGroup() as group:
            case = Case(group, slots, places)
            result = await scenario(case)
        assert case.counts == (0, 0), "a slot or a place leaked"
        assert case.engine.requests == {}, "the engine still works for nobody"
        return result

    return run_async(run())


def test_tokens_reach_the_sink_with_their_positions_and_the_usage_is_the_answers() -> None:
    async def scenario(case: Case) -> Any:
        asked = case.ask(1, choice=2)
        await settle()
        case.engine.give(case.key(1), [7, 8])
        case.engine.give(case.key(1), [9], FinishReason.STOP)
        return await asked

    result = play(scenario)

    assert [(delta.position, list(delta.token_ids), delta.choice) for delta in result.deltas] == [
        (0, [7, 8], 2),
        (2, [9], 2),
    ]
    assert result.finish.reason is FinishReason.STOP
    assert result.finish.usage == Usage(1, 3)


def test_a_continued_request_counts_what_it_brings() -> None:
    async def scenario(case: Case) -> Any:
        asked = case.ask(1, generated_token_ids=(5, 6))
        await settle()
        assert case.engine.submitted[0].generated_token_ids == (5, 6)
        case.engine.give(case.key(1), [7], FinishReason.LENGTH)
        return await asked

    result = play(scenario)

    assert result.deltas[0].position == 2
    assert result.finish.usage == Usage(1, 3)


def test_a_finish_without_a_token_delivers_nothing() -> None:
    async def scenario(case: Case) -> Any:
        asked = case.ask(1)
        await settle()
        case.engine.give(case.key(1), [], FinishReason.STOP)
        return await asked

    result = play(scenario)

    assert result.deltas == []
    assert result.finish.usage == Usage(1, 0)


def test_whoever_waits_starts_when_a_slot_comes_free_first_come_first_served() -> None:
    async def scenario(case: Case) -> list[list[int]]:
        asked = [case.ask(prompt) for prompt in (1, 2, 3)]
        order = []
        for task in asked:
            await settle()
            order.append(case.running())
            case.engine.give(case.key(case.running()[0]), [7], FinishReason.STOP)
            await task
        return order

    assert play(scenario, slots=1, places=2) == [[1], [2], [3]]


def test_one_more_than_fits_is_refused_at_once_and_costs_the_engine_nothing() -> None:
    async def scenario(case: Case) -> Any:
        asked = [case.ask(prompt) for prompt in (1, 2)]
        refused = await case.ask(3)
        assert case.execute.refused_count == 1
        assert [request.prompt_token_ids for request in case.engine.submitted] == [(1,)]
        for task in asked:
            task.cancel()
        return refused

    assert play(scenario).reason is Reason.WORKER_AT_CAPACITY


def test_a_failure_of_the_engine_comes_after_its_tokens_and_frees_the_slot() -> None:
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


def test_a_running_request_that_is_cancelled_leaves_the_engine_and_the_next_one_starts() -> None:
    async def scenario(case: Case) -> list[int]:
        first, second = case.ask(1), case.ask(2)
        await settle()
        first.cancel()
        await settle()
        running = case.running()
        second.cancel()
        return running

    assert play(scenario) == [2]


def test_a_waiting_request_that_is_cancelled_never_reaches_the_engine_and_frees_its_place() -> None:
    async def scenario(case: Case) -> list[tuple[int, ...]]:
        first, second = case.ask(1), case.ask(2)
        await settle()
        second.cancel()
        await settle()
        assert case.counts == (1, 0)
        third = case.ask(3)
        await settle()
        assert case.counts == (1, 1)
        first.cancel()
        await settle()
        third.cancel()
        return [request.prompt_token_ids for request in case.engine.submitted]

    assert play(scenario) == [(1,), (3,)]


def test_those_that_run_and_those_that_wait_may_hang_up_in_the_same_moment() -> None:
    async def scenario(case: Case) -> None:
        asked = [case.ask(prompt) for prompt in range(6)]
        await settle()
        for task in asked:
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
def test_what_the_engine_raises_at_submission_is_that_requests_failure_alone(
    position: str, refusal: Exception, reason: Reason
) -> None:
    async def scenario(case: Case) -> Any:
        if position == "waiting":
            first = case.ask(1)
            await settle()
            asked = case.ask(2)
            await settle()
            case.engine.refusal = refusal
            case.engine.give(case.key(1), [7], FinishReason.STOP)
            await first
        else:
            case.engine.refusal = refusal
            asked = case.ask(2)
        failure = await asked
        after = case.ask(3)
        await settle()
        assert case.running() == [3]
        after.cancel()
        return failure

    assert play(scenario).reason is reason


def test_a_refusal_of_the_engine_counts_as_one() -> None:
    async def scenario(case: Case) -> int:
        case.engine.refusal = Failure(Reason.WORKER_AT_CAPACITY, "full")
        await case.ask(1)
        return case.execute.refused_count

    assert play(scenario) == 1


def test_a_bug_in_the_engines_cancel_does_not_keep_the_slot() -> None:
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
    """Has a bug."""

    def deliver(self, delta: Delta) -> None:
        raise ZeroDivisionError("a bug")


def test_a_bug_in_one_requests_sink_is_that_requests_failure_and_no_others() -> None:
    """Once it went up through the engine's loop and ended the engine, and with it all requests."""

    async def ask_broken(case: Case) -> Failure:
        with pytest.raises(Failure) as caught:
            await case.execute(make_request(prompt=(1,)), Call(request_id="broken"), BrokenSink())
        return caught.value

    async def scenario(case: Case) -> tuple[Failure, Any]:
        async with asyncio.TaskGroup() as group:
            broken = group.create_task(ask_broken(case))
            whole = case.ask(2)
            await settle()
            case.engine.step(Output(case.key(1), [7]), Output(case.key(2), [8]))
            case.engine.give(case.key(2), [9], FinishReason.STOP)
            return await broken, await whole

    with capture_logs() as logs:
        failure, whole = play(scenario, slots=2)

    assert failure.reason is Reason.INTERNAL
    assert whole.token_ids == [8, 9]
    assert [(line["event"], line["request_id"]) for line in logs] == [("bug", "broken")]


def test_what_the_engine_emits_late_reaches_nobody() -> None:
    async def scenario(case: Case) -> Any:
        asked = case.ask(1)
        await settle()
        key = case.key(1)
        case.engine.give(key, [7], FinishReason.STOP)
        case.engine.give(key, [8])
        result = await asked
        case.engine.give(key, [9])
        return result

    assert play(scenario).token_ids == [7]


def test_a_dead_engine_fails_all_that_run_and_all_that_wait() -> None:
    death = Failure(Reason.ENGINE_DEAD, "dead")

    async def scenario(case: Case) -> list[Any]:
        asked = [case.ask(prompt) for prompt in (1, 2, 3)]
        await settle()
        case.execute.fail_all(death)
        return [await task for task in asked]

    assert play(scenario, slots=2, places=1) == [death] * 3


def test_the_engine_never_has_more_than_n_requests_and_all_come_to_their_end() -> None:
    async def scenario(case: Case) -> tuple[int, list[int]]:
        asked = [case.ask(prompt) for prompt in range(10)]
        await settle()
        while case.engine.requests:
            key = next(iter(case.engine.requests))
            case.engine.give(key, [case.engine.requests[key].prompt_token_ids[0]], FinishReason.STOP)
            await settle()
        results = [await task for task in asked]
        answered = [result.token_ids[0] for result in results if isinstance(result, Collected)]
        return case.engine.running_count_max, answered

    assert play(scenario, slots=3, places=7) == (3, list(range(10)))
