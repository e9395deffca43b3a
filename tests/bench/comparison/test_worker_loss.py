"""What clients saw of a lost worker: streams counted, and the gaps that came after."""

from bench.clients.stream_reader import Answer
from bench.comparison.worker_loss import seen
from tests.bench.clients.test_stream_reader import DONE, HEAD, USAGE, token


def answer(*pieces: tuple[float, bytes], over_at: float = 99.0) -> Answer:
    return Answer([(0.0, HEAD), *pieces], over_at)


CALM = answer((1.0, token("a")), (2.0, token("b") + USAGE + DONE))


def test_a_stream_that_went_on_is_complete_and_right_whatever_its_gap() -> None:
    moved = answer((1.0, token("a")), (4.0, token("b") + USAGE + DONE))

    figures = seen([CALM], [moved], sent_at=1.5, repeats=True)

    assert figures == {
        "gap_ms_p50": 3000.0, "gap_ms_p75": 3000.0, "gap_ms_p99": None, "gap_ms_max": 3000.0,
        "complete": 1, "text_equal": 1, "usage_right": 1,
    }  # fmt: skip


def test_a_stream_that_never_went_on_is_none_of_it_and_has_its_wait_for_a_gap() -> None:
    lost = answer((1.0, token("a")), over_at=16.0)

    figures = seen([CALM], [lost], sent_at=1.5, repeats=True)

    assert (figures["complete"], figures["text_equal"], figures["usage_right"]) == (0, 0, 0)
    assert figures["gap_ms_max"] == 15_000.0


def test_random_texts_are_not_compared() -> None:
    assert seen([CALM], [CALM], sent_at=1.5, repeats=False)["text_equal"] is None


def test_gaps_are_those_of_all_streams() -> None:
    moved = answer((1.0, token("a")), (4.0, token("b") + DONE))

    figures = seen([CALM] * 4, [CALM, CALM, CALM, moved], sent_at=1.5, repeats=True)

    assert (figures["gap_ms_p50"], figures["gap_ms_p75"]) == (1000.0, 3000.0)
