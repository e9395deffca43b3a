"""The sampled streams: a few of a run's, told of as they came."""

import pytest

from bench.clients.sampled_streams import sampled_streams, summary
from bench.clients.stream_reader import Answer
from tests.bench.clients.test_stream_reader import DONE, HEAD, token


@pytest.mark.parametrize(("streams", "sampled"), [(1, 1), (2, 1), (8, 2), (16, 4), (1024, 4)])
def test_they_are_one_at_least_and_at_most_a_quarter_and_few(streams: int, sampled: int) -> None:
    assert sampled_streams(streams) == sampled


def test_tokens_per_event_are_those_asked_for_over_the_events_that_came() -> None:
    answer = Answer([(1.0, HEAD + token("ab")), (1.5, token("cd") + DONE)])

    assert summary([answer, answer], tokens=4, ended_at=2.0) == {
        "ended_at": 2.0, "tokens_per_event": 2.0, "gaps_s": [0.5, 0.5],
    }  # fmt: skip


def test_an_answer_that_was_cut_off_is_no_figure() -> None:
    assert "failed" in summary([Answer([(1.0, HEAD + token("ab"))])], tokens=2, ended_at=2.0)
