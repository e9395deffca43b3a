"""Refusals are measured over both wires, and their figures are those that the report shows."""

import pytest

from bench.comparison.overload_figures import overload_figures, refusal_figures
from bench.comparison.report import PARTS
from bench.comparison.rounds import GRPC, HTTP_1
from bench.measure.errors import BenchError

SHOWN = {part.name: part.figures.keys() for part in PARTS}["overload"]


def test_refusals_are_measured_over_both_wires() -> None:
    seen = overload_figures(seconds=0.2)

    assert seen.keys() == {GRPC, HTTP_1}
    for figures in seen.values():
        assert figures.keys() == SHOWN
        assert all(figures.values())


def test_reply_that_is_no_refusal_is_an_error() -> None:
    class Storms:
        def refusals(self, kind: str) -> dict[str, object]:
            return {"is_honest": False, "replies": {"lost: hung up": 1}}

    with pytest.raises(BenchError, match="hung up"):
        refusal_figures(Storms(), "grpc")  # type: ignore[arg-type]
