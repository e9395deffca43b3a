"""A few streams of a run are sampled, and their events are summarised."""

import pytest

from bench.clients.sampled_streams import sampled_count, summary
from bench.clients.stream_reader import Answer
from tests.bench.sse import DONE, HEAD, token


@pytest.mark.parametrize(("streams", "sampled"), [(1, 1), (2, 1), (8, 2), (16, 4), (1024, 4)])
def test_between_one_and_four_streams_but_at_most_a_quarter_are_sampled(streams: int, sampled: int) -> None:
    assert sampled_count(streams) == sampled


def test_tokens_per_event_is_requested_tokens_divided_by_received_events() -> None:
    answer = Answer([(1.0, HEAD + token("ab")), (1.5, token("cd") + DONE)])

    assert summary([answer, answer], tokens=4, ended_at=2.0) == {
        "ended_at": 2.0, "tokens_per_event": 2.0, "gaps_s": [0.5, 0.5],
    }  # fmt: skip


def test_answer_that_was_cut_off_fails_the_sample() -> None:
    assert "failed" in summary([Answer([(1.0, HEAD + token("ab"))])], tokens=2, ended_at=2.0)
