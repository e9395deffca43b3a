"""The effect of a lost worker: which streams were complete and correct, and the gaps after the loss."""

from bench.clients.stream_reader import Answer
from bench.comparison.worker_loss import compare_answers
from tests.bench.sse import DONE, HEAD, USAGE, token


def answer(*pieces: tuple[float, bytes], over_at: float = 99.0) -> Answer:
    return Answer([(0.0, HEAD), *pieces], over_at)


CALM = answer((1.0, token("a")), (2.0, token("b") + USAGE + DONE))


def test_stream_that_continued_is_complete_and_correct_whatever_its_gap() -> None:
    moved = answer((1.0, token("a")), (4.0, token("b") + USAGE + DONE))

    figures = compare_answers([CALM], [moved], sent_at=1.5, repeats=True)

    assert figures == {
        "gap_ms_p50": 3000.0, "gap_ms_p75": 3000.0, "gap_ms_p99": None, "gap_ms_max": 3000.0,
        "complete": 1, "text_equal": 1, "usage_right": 1,
    }  # fmt: skip


def test_stream_that_never_continued_counts_its_wait_as_a_gap() -> None:
    lost = answer((1.0, token("a")), over_at=16.0)

    figures = compare_answers([CALM], [lost], sent_at=1.5, repeats=True)

    assert (figures["complete"], figures["text_equal"], figures["usage_right"]) == (0, 0, 0)
    assert figures["gap_ms_max"] == 15_000.0


def test_random_texts_are_not_compared() -> None:
    assert compare_answers([CALM], [CALM], sent_at=1.5, repeats=False)["text_equal"] is None


def test_gap_quantiles_are_over_all_streams() -> None:
    moved = answer((1.0, token("a")), (4.0, token("b") + DONE))

    figures = compare_answers([CALM] * 4, [CALM, CALM, CALM, moved], sent_at=1.5, repeats=True)

    assert (figures["gap_ms_p50"], figures["gap_ms_p75"]) == (1000.0, 3000.0)
