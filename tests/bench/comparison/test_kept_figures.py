"""The figures of streams that can be resumed are those that the report shows."""

from bench.comparison.kept_figures import figures_of, kept_figures
from bench.comparison.report import PARTS
from bench.comparison.systems import ours
from bench.frontend_loss import Loss

SHOWN = {part.name: part.figures.keys() for part in PARTS}
GAPS = {"p50": 20.0, "p99": 80.0, "max": 90.0}


def loss(equal: int = 4, prompt_tokens_twice: float = 0, tokens_twice: float = 0) -> Loss:
    return Loss(4, 4, 4, equal, prompt_tokens_twice, tokens_twice, GAPS, {"p50": 20.0, "p99": 30.0, "max": 31.0})


def test_report_shows_what_the_loss_of_a_frontend_has_done() -> None:
    figures = figures_of(loss(equal=3, tokens_twice=5))

    assert figures.keys() == SHOWN["frontend"]
    assert (figures["equal"], figures["tokens_twice"], figures["gap_ms_p99"]) == (3, 5, 80.0)
    assert figures["calm_gap_ms_p99"] == 30.0


def test_loss_is_right_if_all_answers_are_equal_and_nothing_was_computed_twice() -> None:
    assert loss().is_right
    assert not any(one.is_right for one in (loss(equal=3), loss(prompt_tokens_twice=1), loss(tokens_twice=-1)))


def test_report_shows_what_both_kinds_of_streams_cost() -> None:
    with ours(6.0) as running:
        kept, plain = kept_figures(running, streams=2, tokens=20)

    for figures in (kept, plain):
        assert figures.keys() == SHOWN["kept"]
        assert all(figures.values())
