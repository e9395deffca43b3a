"""The result cursor: returns each token once, in order, and none after the end, however the engine's lists change."""

import math
from typing import Any

import pytest

from services.core.errors import Reason
from services.core.interface import TokenLogprobs
from services.core.request import FinishReason
from services.worker.engine import Output
from services.worker.engines.trtllm.result_cursor import ResultCursor
from services.worker.engines.trtllm.sampling_params import ModelFacts
from tests.fakes.tensorrt_llm.executor.result import CompletionOutput, Logprob
from tests.support.doubles import make_request

END = 256
FACTS = ModelFacts(context_length=1000, vocab_size=257, end_ids=(END,))


class Reader:
    """A cursor, and the one object that the engine changes at each result."""

    def __init__(self, **fields: Any) -> None:
        self.cursor = ResultCursor(1, make_request(**fields), FACTS)
        self.completion = CompletionOutput(0)

    def read(self, *token_ids: int, finish: str | None = None, logprobs: list[Any] | None = None) -> Output | None:
        """Set the engine's lists to these values, and read what is new."""
        self.completion.token_ids = list(token_ids)
        self.completion.finish_reason = finish
        self.completion.logprobs = logprobs or []
        return self.cursor.read(self.completion, is_finished=finish is not None)


def test_each_token_is_returned_once() -> None:
    reader = Reader()

    assert reader.read(5) == Output(1, [5])
    assert reader.read(5) is None
    assert reader.read(5, 6, 7) == Output(1, [6, 7])


def test_list_that_shrinks_at_the_end_does_not_retract_tokens() -> None:
    reader = Reader()
    reader.read(5, 6, 7)

    assert reader.read(5, finish="stop") == Output(1, [], FinishReason.STOP)


def test_end_token_ends_the_answer_and_is_not_returned() -> None:
    assert Reader().read(5, END) == Output(1, [5], FinishReason.STOP)
    assert Reader().read(END, 5) == Output(1, [], FinishReason.STOP)


def test_ignored_end_token_is_an_ordinary_token() -> None:
    assert Reader(ignore_eos=True).read(5, END, 6) == Output(1, [5, END, 6])


def test_stop_token_ends_the_answer_even_if_the_engine_continues() -> None:
    assert Reader(stop_token_ids=(6,)).read(5, 6, 7) == Output(1, [5], FinishReason.STOP)


def test_tokens_beyond_max_tokens_are_dropped() -> None:
    assert Reader(max_tokens=2).read(5, 6, 7) == Output(1, [5, 6], FinishReason.LENGTH)


def test_tokens_from_before_a_migration_count_towards_max_tokens() -> None:
    cursor = ResultCursor(1, make_request(max_tokens=3).after([8, 9]), FACTS)

    assert cursor.read(CompletionOutput(0, token_ids=[5]), is_finished=False) == Output(1, [5], FinishReason.LENGTH)


@pytest.mark.parametrize(("reason", "finish"), [("stop", FinishReason.STOP), ("length", FinishReason.LENGTH)])
def test_finish_reason_of_the_engine_is_translated(reason: str, finish: FinishReason) -> None:
    assert Reader().read(5, finish=reason) == Output(1, [5], finish)


def failure_of(output: Output | None) -> Reason | None:
    return output.failure.reason if output is not None and output.failure is not None else None


@pytest.mark.parametrize("reason", ["cancelled", "timeout", "not_finished", ""])
def test_unusual_finish_reason_is_a_failure_not_a_short_answer(reason: str) -> None:
    assert failure_of(Reader().read(5, finish=reason)) is Reason.ENGINE_ERROR


def test_end_before_min_tokens_is_a_failure_not_a_short_answer() -> None:
    assert failure_of(Reader(min_tokens=3).read(5, 6, finish="stop")) is Reason.ENGINE_ERROR
    assert failure_of(Reader(min_tokens=3).read(5, 6, END)) is Reason.ENGINE_ERROR
    assert Reader(min_tokens=3).read(5, 6, 7, END) == Output(1, [5, 6, 7], FinishReason.STOP)


def test_skipped_tokens_are_counted() -> None:
    reader = Reader()
    reader.read(5)
    reader.cursor.skip(CompletionOutput(0, token_ids=[5, 6, 7]))

    assert reader.cursor.drawn == 3


# Log probabilities


def entry(**values: float) -> dict[int, Logprob]:
    return {int(name[1:]): Logprob(value, rank) for rank, (name, value) in enumerate(values.items(), start=1)}


def logprobs_of(output: Output | None) -> Any:
    return None if output is None else output.logprobs


def test_each_token_has_its_own_log_probability_and_the_likeliest_ones() -> None:
    first, second = entry(t5=-0.1, t6=-2.0), entry(t7=-0.5, t8=-1.0, t6=-3.0)
    reader = Reader(logprobs=2)

    assert logprobs_of(reader.read(5, logprobs=[first])) == [TokenLogprobs(-0.1, ((5, -0.1), (6, -2.0)))]
    assert logprobs_of(reader.read(5, 6, logprobs=[first, second])) == [TokenLogprobs(-3.0, ((7, -0.5), (8, -1.0)))]


def test_equally_likely_tokens_are_ordered_by_id() -> None:
    output = Reader(logprobs=2).read(9, logprobs=[entry(t9=-1.0, t4=-1.0)])

    assert logprobs_of(output) == [TokenLogprobs(-1.0, ((4, -1.0), (9, -1.0)))]


def test_log_probabilities_are_absent_unless_requested() -> None:
    assert logprobs_of(Reader().read(5, logprobs=[entry(t5=-0.1)])) is None


def test_rivals_beyond_the_requested_number_are_left_out() -> None:
    """The engine reads 0 as none at all, so one rival is requested."""
    assert logprobs_of(Reader(logprobs=0).read(5, logprobs=[entry(t5=-0.1)])) == [TokenLogprobs(-0.1)]


def test_bare_number_is_the_log_probability_of_the_token() -> None:
    assert logprobs_of(Reader(logprobs=0).read(5, logprobs=[-0.25])) == [TokenLogprobs(-0.25)]


@pytest.mark.parametrize("given", [[], [{6: Logprob(-0.1, 1)}], [-math.pi]])
def test_missing_log_probabilities_fail_the_request(given: list[Any]) -> None:
    assert failure_of(Reader(logprobs=1).read(5, logprobs=given)) is Reason.ENGINE_ERROR


@pytest.mark.parametrize("given", [[None], [{5: -0.1}], [{5: Logprob("none", 1)}]])  # type: ignore[arg-type]
def test_unreadable_result_fails_the_request_and_not_the_engine(given: list[Any]) -> None:
    assert failure_of(Reader(logprobs=0).read(5, logprobs=given)) is Reason.ENGINE_ERROR
