"""A request on the engine: what each event does while it is wanted, and after it is no longer wanted."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from services.core.errors import Failure, Reason
from services.core.request import FinishReason, Guided, GuidedKind
from services.worker.engine import Output
from services.worker.engines.trtllm.engine_request import EngineRequest
from services.worker.engines.trtllm.result_cursor import ResultCursor
from services.worker.engines.trtllm.sampling_params import ModelFacts
from tests.support.clock import pass_time, run_clocked, settle
from tests.support.doubles import make_request

END = 256
FACTS = ModelFacts(context_length=1000, vocab_size=257, end_ids=(END,))
PROMPT = (1, 2, 3)
ABORT_S = 2.0


class EngineError(Exception):
    """The RequestError of the engine."""


class Result:
    """The result of `generate_async`, with results that the test sends."""

    def __init__(self) -> None:
        self.finished = False
        self.cached_tokens = 0
        self.outputs = [SimpleNamespace(token_ids=[], logprobs=None, finish_reason=None)]
        self.abort_count = 0
        self._sent: asyncio.Queue[Exception | None] = asyncio.Queue()

    def send(self, *token_ids: int, finish: str | None = None) -> None:
        """Send the tokens of the whole answer so far. `finish`: this is the last result."""
        self.finished = finish is not None
        self.outputs = [SimpleNamespace(token_ids=list(token_ids), logprobs=None, finish_reason=finish)]
        self._sent.put_nowait(None)

    def fail(self, error: Exception) -> None:
        self._sent.put_nowait(error)

    async def __anext__(self) -> "Result":
        if (error := await self._sent.get()) is not None:
            raise error
        return self

    def abort(self) -> None:
        self.abort_count += 1


class Bench:
    """One request that is followed, and what its listener was called with."""

    def __init__(self, **fields: Any) -> None:
        request = make_request(PROMPT, **fields)
        self.result = Result()
        self.counts: list[tuple[int, int]] = []
        self.outputs: list[Output] = []
        cursor = ResultCursor(1, request, FACTS)
        self.request = EngineRequest(cursor, request, self.result, self, rank=0, abort_s=ABORT_S)
        self.following = asyncio.ensure_future(self.request.follow(EngineError))

    def on_result(self, active: EngineRequest, *, prefilled: int, drawn: int) -> None:
        assert active is self.request
        self.counts.append((prefilled, drawn))

    def on_output(self, active: EngineRequest, output: Output) -> None:
        assert active is self.request
        self.outputs.append(output)

    async def send(self, *token_ids: int, finish: str | None = None) -> None:
        self.result.send(*token_ids, finish=finish)
        await settle()

    async def fail(self, error: Exception) -> None:
        self.result.fail(error)
        await settle()

    def reason(self) -> Reason | None:
        """The reason of the last output's failure."""
        failure = self.outputs[-1].failure
        return None if failure is None else failure.reason


def play(scenario: Callable[[Bench], Any], **fields: Any) -> Bench:
    async def played() -> Bench:
        bench = Bench(**fields)
        await settle()
        await scenario(bench)
        bench.following.cancel()
        await settle()
        return bench

    return run_clocked(played())


# While wanted


def test_result_emits_its_new_tokens() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.send(5)
        await bench.send(5, 6)

    bench = play(scenario)

    assert bench.outputs == [Output(1, [5]), Output(1, [6])]
    assert (bench.request.drawn, bench.request.token_count) == (2, len(PROMPT) + 2)


def test_prompt_counts_as_computed_once_with_the_first_token_without_its_cached_part() -> None:
    async def scenario(bench: Bench) -> None:
        assert bench.request.prefill_left == len(PROMPT)
        bench.result.cached_tokens = 1
        await bench.send()
        await bench.send(5)
        await bench.send(5, 6)

    bench = play(scenario)

    assert bench.counts == [(0, 0), (len(PROMPT) - 1, 1), (0, 1)]
    assert bench.request.prefill_left == 0


def test_last_result_ends_the_answer_without_an_abort() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.send(5, finish="length")
        assert bench.following.done()

    bench = play(scenario)

    assert bench.outputs == [Output(1, [5], FinishReason.LENGTH)]
    assert not bench.request.is_wanted
    assert bench.result.abort_count == 0


def test_answer_that_ends_before_the_last_result_is_aborted_and_waits_for_it() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.send(5, END, 6)
        assert (bench.result.abort_count, bench.following.done()) == (1, False)
        await bench.send(5, END, 6, finish="cancelled")
        assert bench.following.done()

    assert play(scenario).outputs == [Output(1, [5], FinishReason.STOP)]


def test_cancel_aborts_once_and_waits_for_the_last_result() -> None:
    async def scenario(bench: Bench) -> None:
        bench.request.cancel()
        bench.request.cancel()
        bench.request.abort()
        await settle()
        assert (bench.result.abort_count, bench.following.done()) == (1, False)

    bench = play(scenario)

    assert bench.request.is_cancelled
    assert bench.outputs == []


def test_request_error_fails_the_request() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.fail(EngineError("too long"))
        assert bench.following.done()

    assert play(scenario).reason() is Reason.ENGINE_ERROR


def test_request_error_of_a_guided_request_before_its_first_token_is_the_clients() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.fail(EngineError("bad grammar"))

    assert play(scenario, guided=Guided(GuidedKind.JSON_OBJECT)).reason() is Reason.INVALID_ARGUMENT


def test_results_that_stop_without_a_last_one_fail_the_request() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.fail(StopAsyncIteration())

    assert play(scenario).reason() is Reason.ENGINE_ERROR


def test_any_other_error_is_raised_because_the_engine_is_dead() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.fail(RuntimeError("a rank is gone"))
        with pytest.raises(RuntimeError, match="a rank is gone"):
            bench.following.result()

    assert play(scenario).outputs == []


def test_fail_ends_the_request_with_that_failure_and_aborts_it() -> None:
    async def scenario(bench: Bench) -> None:
        bench.request.fail(Failure(Reason.ENGINE_ERROR, "silent"))

    bench = play(scenario)

    assert bench.reason() is Reason.ENGINE_ERROR
    assert bench.result.abort_count == 1


# No longer wanted


def test_results_after_a_cancel_are_only_counted() -> None:
    async def scenario(bench: Bench) -> None:
        bench.request.cancel()
        await bench.send(5, 6)

    bench = play(scenario)

    assert bench.outputs == []
    assert bench.counts == [(len(PROMPT), 2)]


def test_request_without_a_last_result_is_given_up_after_abort_s() -> None:
    async def scenario(bench: Bench) -> None:
        bench.request.cancel()
        pass_time(ABORT_S - 0.1)
        await settle()
        assert not bench.following.done()
        pass_time(0.2)
        await settle()
        assert bench.following.done()
        assert bench.following.exception() is None

    assert play(scenario).outputs == []


def test_request_error_after_a_cancel_is_ignored() -> None:
    async def scenario(bench: Bench) -> None:
        bench.request.cancel()
        await bench.fail(EngineError("aborted"))
        assert bench.following.exception() is None

    assert play(scenario).outputs == []


def test_abort_that_raises_is_ignored() -> None:
    async def scenario(bench: Bench) -> None:
        def refuse() -> None:
            raise RuntimeError("the executor has shut down")

        bench.result.abort = refuse  # type: ignore[method-assign]
        bench.request.cancel()

    assert play(scenario).request.is_cancelled
