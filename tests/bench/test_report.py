"""The report: medians and ranges of the rounds, ratios within a round, and nothing where nothing was measured."""

import pytest

from bench.load import Figures
from bench.report import OURS, PEER, Spread, document, ratios, spread, table


def figures(cpu_us: float) -> Figures:
    return Figures(
        cpu_us_per_token=cpu_us, tokens_per_s=40_000 / cpu_us, first_token_ms_p50=cpu_us, first_token_ms_p99=2 * cpu_us
    )


def cells(text: str, streams: int, figure: str) -> list[str]:
    [line] = [line for line in text.splitlines() if line.startswith(f"| {streams} | {figure} |")]
    return [cell.strip() for cell in line.strip("|").split("|")][2:]


def test_a_spread_is_the_median_and_the_range_in_any_order() -> None:
    assert spread([3.0, 1.0, 2.0]) == Spread(median=2.0, least=1.0, most=3.0)
    assert spread([1.0, 2.0]) == Spread(median=1.5, least=1.0, most=2.0)
    assert spread([]) is None


def test_a_spread_has_three_digits_or_all_before_the_point() -> None:
    assert str(Spread(12.345, 0.98765, 12345.6)) == "12.3 (0.988 to 12,346)"


def test_a_ratio_is_that_of_one_round() -> None:
    """The machine was twice as slow in the second: the ratio is the same."""
    assert ratios([10, 20], [20, 40]) == [0.5, 0.5]


def test_rounds_without_the_other_have_no_ratio() -> None:
    assert ratios([10, 20], [20]) == [0.5]
    assert ratios([10], [0.0]) == []


def test_each_figure_of_each_number_of_streams_has_a_line_with_both_and_their_ratio() -> None:
    rounds = {
        16: {OURS: [figures(10.0), figures(20.0), figures(30.0)], PEER: [figures(20.0), figures(40.0), figures(60.0)]},
        64: {OURS: [figures(4.0)], PEER: [figures(1.0)]},
    }

    text = table(rounds, {16: [2.0, 2.0, 2.0], 64: [2.0]})

    assert cells(text, 16, "frontend CPU, µs per token") == ["20 (10 to 30)", "40 (20 to 60)", "0.5 (0.5 to 0.5)"]
    assert cells(text, 16, "the same in bare sends") == ["10 (5 to 15)", "20 (10 to 30)", "—"]
    assert cells(text, 64, "tokens per second")[2] == "0.25 (0.25 to 0.25)"
    assert cells(text, 64, "time to first token p99, ms")[:2] == ["8 (8 to 8)", "2 (2 to 2)"]


def test_without_the_peer_its_column_is_empty() -> None:
    text = table({16: {OURS: [figures(10.0)]}}, {16: [2.0]})

    assert cells(text, 16, "frontend CPU, µs per token") == ["10 (10 to 10)", "—", "—"]


@pytest.mark.parametrize("fact", ["- machine: a machine", "1.5 (1 to 2) µs at 16 streams"])
def test_the_document_says_what_was_measured_where(fact: str) -> None:
    assert fact in document({16: {OURS: [figures(10.0)]}}, {16: [1.0, 2.0]}, {"machine": "a machine"})
