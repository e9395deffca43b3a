"""The chart of the main figures: cost per token, tokens per second, and time to the first token."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.comparison.rounds import MACHINE, OURS, PEER, SMG, Round, rows, spread, values

COLOURS = {OURS: "#1a6fb5", PEER: "#c9541f", SMG: "#3a8f4d", MACHINE: "#777777"}
INCHES = (11.0, 5.5)
DOTS_PER_INCH = 120


@dataclass(frozen=True)
class Line:
    """One system's figure against the number of streams. `label`: shown instead of the system's name."""

    system: str
    figure: str
    part: str = "http"
    label: str = ""
    style: str = "-"


PANELS = {
    "frontend CPU, µs per token": (
        Line(OURS, "cpu_us_per_token"),
        Line(PEER, "cpu_us_per_token"),
        Line(SMG, "cpu_us_per_token"),
        Line(MACHINE, "send_us", "floor", "a bare send", ":"),
    ),
    "tokens per second": tuple(Line(system, "tokens_per_s") for system in (OURS, PEER, SMG)),
    "time to first token, ms": (
        Line(OURS, "first_token_ms_p50", label="Unbroken p50"),
        Line(PEER, "first_token_ms_p50", label="Dynamo p50"),
        Line(OURS, "first_token_ms_p99", label="Unbroken p99", style="--"),
        Line(PEER, "first_token_ms_p99", label="Dynamo p99", style="--"),
    ),
}
"""The first panel is the large one."""


def draw(rounds: Sequence[Round], file: Path) -> None:
    """Write the chart to a file. Raises ImportError if matplotlib is not installed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    axes = figure.subplot_mosaic([["large", "upper"], ["large", "lower"]], width_ratios=[3, 2])
    for place, (title, lines) in zip(("large", "upper", "lower"), PANELS.items(), strict=True):
        fill(axes[place], title, lines, rounds)
    axes["large"].set_xlabel("concurrent streams")
    axes["lower"].set_xlabel("concurrent streams")
    figure.savefig(file)


def fill(axes: Any, title: str, lines: Sequence[Line], rounds: Sequence[Round]) -> None:
    """Draw medians as lines and ranges as bars, on logarithmic scales. Hides the panel if nothing was measured."""
    measured = {line: points for line in lines if (points := series(rounds, line))}
    if not measured:
        axes.set_visible(False)
        return
    for line, points in measured.items():
        streams, medians, below, above = zip(*points, strict=True)
        looks = {"fmt": f"o{line.style}", "color": COLOURS[line.system], "markersize": 4, "capsize": 2}
        axes.errorbar(streams, medians, yerr=(below, above), label=line.label or line.system, **looks)
    scale(axes, [int(row) for row in rows(rounds, "http")])
    axes.set_title(title, fontsize="medium", loc="left")
    axes.legend(fontsize="small")


def scale(axes: Any, streams: Sequence[int]) -> None:
    """Label both axes with plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(streams, labels=map(str, streams))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:,.6g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(visible=True, which="both", alpha=0.25)


def series(rounds: Sequence[Round], line: Line) -> list[tuple[int, float, float, float]]:
    """Return (streams, median, distance down to the minimum, distance up to the maximum) for each measured row."""
    known = ((row, spread(values(rounds, line.part, row, line.system, line.figure))) for row in rows(rounds, line.part))
    return [
        (int(row), one.median, one.median - one.least, one.most - one.median) for row, one in known if one is not None
    ]
