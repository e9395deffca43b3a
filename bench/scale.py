"""Measure what a frontend and a registry cost as they grow to 1,000 workers, 10,000 streams and 10,000 instances.

Everything runs in one process, without sockets except those to etcd: only this project's own code is measured, against
the number of things that it manages. A cost that grows with a number on which it should not depend is a bug. Garbage is
collected only between the measurements.
"""

import gc
import logging
import os
import platform
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
import structlog

from bench.growth import frontend, registry
from bench.growth.curve import Costs, Curve, cost_of, draw, table
from bench.measure.conditions import command, machine
from services.runtime.loop import run_on_loop

RESULTS = Path(__file__).parent / "results"


async def measure(curve: Curve, repeats: int, size_max: int) -> Costs:
    """Measure one curve on an event loop of its own, so that no curve affects the next."""
    costs = {}
    for size in curve.sizes:
        if size <= size_max or size == curve.sizes[0]:
            gc.collect()
            costs[size] = await cost_of(curve, size, repeats)
    return costs


def curves() -> Sequence[Curve]:
    """Return all curves; those over etcd only where etcd is installed."""
    etcd = registry.ETCD_CURVES if shutil.which("etcd") else ()
    return [*frontend.CURVES, *registry.CURVES, *etcd]


def curves_named(part: str) -> Sequence[Curve]:
    """Return the curves whose names contain `part`. Raises UsageError if there are none."""
    every = curves()
    if not (chosen := [curve for curve in every if part in curve.name]):
        names = "; ".join(curve.name for curve in every)
        raise click.UsageError(f"--only {part}: no name contains this. The names are: {names}")
    return chosen


def about(repeats: int, load_before: float) -> dict[str, str]:
    """Return what a reader must know about how the figures were measured."""
    return {
        "machine": machine(),
        "Python": platform.python_version(),
        "load average before": f"{load_before:.2f}",
        "setup": f"one process, no sockets except to etcd; CPU time of this process; medians of {repeats} repeats",
        "command": command("bench.scale"),
    }


def document(costs: Mapping[Curve, Costs], facts: Mapping[str, str]) -> str:
    lines = [f"- {name}: {value}" for name, value in facts.items()]
    return "\n".join(
        ["# Cost against size", "", table(costs), "", *lines, "", "![The same figures as a chart](scale.png)", ""]
    )


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--repeats", type=click.IntRange(1), default=5, help="Repeats of each measurement.")
@click.option("--size-max", type=click.IntRange(1), default=10_000, help="Largest size to measure.")
@click.option("--only", default="", help="Measure only the curves whose names contain this.")
@click.option("--results", type=click.Path(path_type=Path, file_okay=False), default=RESULTS, help="Output folder.")
def main(repeats: int, size_max: int, only: str, results: Path) -> None:
    chosen = curves_named(only)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    load_before = os.getloadavg()[0]
    gc.disable()
    costs = {}
    for curve in chosen:
        costs[curve] = run_on_loop(measure(curve, repeats, size_max))
        print(table({curve: costs[curve]}).splitlines()[-1], file=sys.stderr)
    text = document(costs, about(repeats, load_before))
    results.mkdir(parents=True, exist_ok=True)
    (results / "scale.md").write_text(text, encoding="utf-8")
    draw(costs, results / "scale.png")
    click.echo(text)


if __name__ == "__main__":
    main()
