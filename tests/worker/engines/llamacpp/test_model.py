"""Log probabilities: the softmax of the raw scores, identical in every process."""

import math
from pathlib import Path

import pytest

from services.models.download import resolve
from services.worker.engines.llamacpp.model import Llama, token_logprobs


def test_log_probabilities_are_the_natural_logarithms_of_the_softmax() -> None:
    scores = [math.log(1), math.log(6), math.log(3)]

    found = token_logprobs(scores, 0, 2)

    assert found.logprob == pytest.approx(math.log(0.1))
    assert [token for token, _ in found.top] == [1, 2]
    assert [value for _, value in found.top] == pytest.approx([math.log(0.6), math.log(0.3)])


def test_drawn_token_counts_among_the_likeliest() -> None:
    found = token_logprobs([1.0, 3.0, 2.0], 1, 1)

    assert found.top == ((1, found.logprob),)


def test_equally_likely_tokens_are_ordered_by_id() -> None:
    assert [token for token, _ in token_logprobs([1.0, 2.0, 2.0, 2.0], 0, 2).top] == [1, 2]


def test_zero_rivals_give_an_empty_top_list() -> None:
    assert token_logprobs([0.0, 0.0], 1, 0).top == ()


def test_scores_that_would_overflow_an_exponential_give_exact_log_probabilities() -> None:
    found = token_logprobs([5000.0, 4000.0, -math.inf], 0, 3)

    assert found.logprob == 0.0
    assert [value for _, value in found.top] == [0.0, -1000.0, -math.inf]


def test_more_rivals_than_tokens_give_all_tokens() -> None:
    assert len(token_logprobs([0.0, 1.0], 0, 20).top) == 2


@pytest.mark.model
@pytest.mark.parametrize("size", [3_000, 3_000_000])
def test_file_that_is_cut_off_is_refused_without_advice_for_programmers(tmp_path: Path, size: int) -> None:
    file = tmp_path / "cut.gguf"
    with resolve("smollm2").open("rb") as whole:
        file.write_bytes(whole.read(size))

    with pytest.raises(ValueError, match="download it again") as raised:
        Llama(file, sequences=1, context_length=None, threads=1, decode_tokens_max=64)

    assert "verbose" not in str(raised.value)
