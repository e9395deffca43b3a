"""Cost against size: the measurements of an operation at several sizes, as a table and as a chart.

Times are CPU times of this process, so other load on the machine does not count.
"""

import asyncio
import math
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

INCHES = (12.0, 11.0)
COLUMNS = 2
DOTS_PER_INCH = 120
MISSING = ""

Measure = Callable[[int, int], Awaitable[Sequence[float]]]
"""(size, repeats) → the cost of one operation at that size, once per repeat."""


@dataclass(frozen=True)
class Curve:
    """One operation. `of`: what `sizes` counts. `unit`: of the cost. `group`: the panel of the chart."""

    group: str
    name: str
    of: str
    sizes: Sequence[int]
    measure: Measure
    unit: str = "µs"


@dataclass(frozen=True)
class Cost:
    """The median of the repeats, and their range."""

    median: float
    least: float
    most: float


Costs = Mapping[int, Cost]
"""By size."""


async def cost_of(curve: Curve, size: int, repeats: int) -> Cost:
    values = await curve.measure(size, repeats)
    return Cost(statistics.median(values), min(values), max(values))


async def wait_until(condition: Callable[[], bool]) -> None:
    """Yield to the event loop until the condition holds. The condition depends on this process alone."""
    while True:
        if condition():
            return
        await asyncio.sleep(0)


def us_each(operation: Callable[[], object], times: int) -> float:
    """Return the mean CPU microseconds of one call."""
    began = time.process_time()
    for _ in range(times):
        operation()
    return (time.process_time() - began) * 1e6 / times


def table(costs: Mapping[Curve, Costs]) -> str:
    """Return a row for each curve and a column for each size. The last column shows how much the cost grows."""
    sizes = sorted({size for each in costs.values() for size in each})
    head = ["cost of", "against", *(f"{size:,}" for size in sizes), "grows"]
    rows = [head, ["---"] * len(head), *(_row(curve, each, sizes) for curve, each in costs.items())]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(curve: Curve, costs: Costs, sizes: Sequence[int]) -> list[str]:
    shown = [_shown(costs[size].median) if size in costs else MISSING for size in sizes]
    return [f"{curve.name}, {curve.unit}", curve.of, *shown, f"{growth(costs):.1f} ×"]


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def growth(costs: Costs) -> float:
    """Return the cost at the largest size as a multiple of the lowest cost."""
    return costs[max(costs)].median / min(one.median for one in costs.values())


def draw(costs: Mapping[Curve, Costs], file: Path) -> None:
    """Write the chart, one panel for each group. Raises ImportError if matplotlib is not installed."""
    from matplotlib.figure import Figure

    groups = list(dict.fromkeys(curve.group for curve in costs))
    figure = Figure(figsize=INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    panels = figure.subplots(-(-len(groups) // COLUMNS), COLUMNS, squeeze=False).flat
    for panel, group in zip_longest(panels, groups):
        panel.set_visible(group is not None)
        _fill(panel, {curve: each for curve, each in costs.items() if curve.group == group})
    figure.savefig(file)


def _fill(panel: Any, costs: Mapping[Curve, Costs]) -> None:
    """Draw medians as lines and ranges as bars."""
    for curve, each in costs.items():
        medians = [one.median for one in each.values()]
        ranges = [one.median - one.least for one in each.values()], [one.most - one.median for one in each.values()]
        panel.errorbar(list(each), medians, yerr=ranges, fmt="o-", markersize=4, capsize=2, label=curve.name)
        panel.set_title(f"{curve.group}, {curve.unit}", fontsize="medium", loc="left")
        panel.set_xlabel(curve.of if len({one.of for one in costs}) == 1 else "size")
        panel.legend(fontsize="x-small")
    panel.set_xscale("log")
    panel.set_yscale("log")
    low, high = panel.get_ylim()
    panel.set_ylim(10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high)))  # A flat curve looks flat.
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_formatter("{x:,.6g}")
    panel.grid(visible=True, which="major", alpha=0.25)
