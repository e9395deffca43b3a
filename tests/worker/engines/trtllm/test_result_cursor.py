"""Reading an answer: each token once, in order, none after the end, whatever the engine's lists do meanwhile."""

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


class Read:
    """An answer and the one object that the engine changes at each result."""

    def __init__(self, **fields: Any) -> None:
        self.answer = ResultCursor(1, make_request(**fields), FACTS)
        self.completion = CompletionOutput(0)

    def take(self, *token_ids: int, finish: str | None = None, logprobs: list[Any] | None = None) -> Output | None:
        """What is new once the list is this."""
        self.completion.token_ids = list(token_ids)
        self.completion.finish_reason = finish
        self.completion.logprobs = logprobs or []
        return self.answer.take(self.completion, is_finished=finish is not None)


def test_each_token_is_new_once() -> None:
    read = Read()

    assert read.take(5) == Output(1, [5])
    assert read.take(5) is None
    assert read.take(5, 6, 7) == Output(1, [6, 7])


def test_a_list_that_shrinks_at_the_end_takes_nothing_back() -> None:
    read = Read()
    read.take(5, 6, 7)

    assert read.take(5, finish="stop") == Output(1, [], FinishReason.STOP)


def test_the_end_token_ends_it_and_is_not_told() -> None:
    assert Read().take(5, END) == Output(1, [5], FinishReason.STOP)
    assert Read().take(END, 5) == Output(1, [], FinishReason.STOP)


def test_the_end_token_is_like_any_other_where_it_does_not_count() -> None:
    assert Read(ignore_eos=True).take(5, END, 6) == Output(1, [5, END, 6])


def test_a_stop_token_ends_it_even_if_the_engine_goes_on() -> None:
    assert Read(stop_token_ids=(6,)).take(5, 6, 7) == Output(1, [5], FinishReason.STOP)


def test_no_more_tokens_are_told_than_were_asked_for() -> None:
    assert Read(max_tokens=2).take(5, 6, 7) == Output(1, [5, 6], FinishReason.LENGTH)


def test_tokens_from_before_a_move_count() -> None:
    answer = ResultCursor(1, make_request(max_tokens=3).after([8, 9]), FACTS)

    assert answer.take(CompletionOutput(0, token_ids=[5]), is_finished=False) == Output(1, [5], FinishReason.LENGTH)


@pytest.mark.parametrize(("said", "meant"), [("stop", FinishReason.STOP), ("length", FinishReason.LENGTH)])
def test_the_engines_own_end_is_one(said: str, meant: FinishReason) -> None:
    assert Read().take(5, finish=said) == Output(1, [5], meant)


def failure_of(output: Output | None) -> Reason | None:
    return output.failure.reason if output is not None and output.failure is not None else None


@pytest.mark.parametrize("said", ["cancelled", "timeout", "not_finished", ""])
def test_an_end_that_is_none_is_a_failure_and_no_short_answer(said: str) -> None:
    assert failure_of(Read().take(5, finish=said)) is Reason.ENGINE_ERROR


def test_an_end_before_min_tokens_is_a_failure_and_no_short_answer() -> None:
    assert failure_of(Read(min_tokens=3).take(5, 6, finish="stop")) is Reason.ENGINE_ERROR
    assert failure_of(Read(min_tokens=3).take(5, 6, END)) is Reason.ENGINE_ERROR
    assert Read(min_tokens=3).take(5, 6, 7, END) == Output(1, [5, 6, 7], FinishReason.STOP)


def test_what_nobody_wants_any_more_is_counted() -> None:
    read = Read()
    read.take(5)
    read.answer.skip(CompletionOutput(0, token_ids=[5, 6, 7]))

    assert read.answer.drawn == 3


# Log probabilities


def entry(**values: float) -> dict[int, Logprob]:
    return {int(name[1:]): Logprob(value, rank) for rank, (name, value) in enumerate(values.items(), start=1)}


def logprobs_of(output: Output | None) -> Any:
    return None if output is None else output.logprobs


def test_each_token_has_its_own_and_the_likeliest() -> None:
    first, second = entry(t5=-0.1, t6=-2.0), entry(t7=-0.5, t8=-1.0, t6=-3.0)
    read = Read(logprobs=2)

    assert logprobs_of(read.take(5, logprobs=[first])) == [TokenLogprobs(-0.1, ((5, -0.1), (6, -2.0)))]
    assert logprobs_of(read.take(5, 6, logprobs=[first, second])) == [TokenLogprobs(-3.0, ((7, -0.5), (8, -1.0)))]


def test_of_equals_the_lower_id_comes_first() -> None:
    output = Read(logprobs=2).take(9, logprobs=[entry(t9=-1.0, t4=-1.0)])

    assert logprobs_of(output) == [TokenLogprobs(-1.0, ((4, -1.0), (9, -1.0)))]


def test_none_are_told_where_none_were_asked_for() -> None:
    assert logprobs_of(Read().take(5, logprobs=[entry(t5=-0.1)])) is None


def test_rivals_that_were_not_asked_for_are_left_out() -> None:
    """The engine takes 0 for none at all, so it is asked for one."""
    assert logprobs_of(Read(logprobs=0).take(5, logprobs=[entry(t5=-0.1)])) == [TokenLogprobs(-0.1)]


def test_a_bare_number_is_the_tokens_own() -> None:
    assert logprobs_of(Read(logprobs=0).take(5, logprobs=[-0.25])) == [TokenLogprobs(-0.25)]


@pytest.mark.parametrize("given", [[], [{6: Logprob(-0.1, 1)}], [-math.pi]])
def test_those_that_are_missing_fail_the_request_rather_than_be_made_up(given: list[Any]) -> None:
    assert failure_of(Read(logprobs=1).take(5, logprobs=given)) is Reason.ENGINE_ERROR


@pytest.mark.parametrize("given", [[None], [{5: -0.1}], [{5: Logprob("none", 1)}]])  # type: ignore[arg-type]
def test_what_cannot_be_read_fails_the_request_and_not_the_engine(given: list[Any]) -> None:
    assert failure_of(Read(logprobs=0).take(5, logprobs=given)) is Reason.ENGINE_ERROR
