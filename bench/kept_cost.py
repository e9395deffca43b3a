"""Measure what a stream that can be resumed costs beside one that cannot: processor time per token.

    python -m bench.kept_cost

Both kinds run in turn against the same processes. Each figure is the median of the ratios of neighbouring rounds.
"""

import statistics
import tempfile
from pathlib import Path

import click

from bench.clients.requests import KEPT_HEADERS
from bench.comparison.kept_figures import cost_us
from services.runtime.loop import run_on_loop
from tests.integration.harness.clients.send import run_together
from tests.integration.harness.plane.fork_server import ForkServer
from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.plane.processes import Process


def measure(plane: Plane, worker: Process, streams: int, tokens: int, rounds: int) -> None:
    """Print the costs of both kinds, and their ratios."""
    pids = ([plane.frontend.pid], [worker.pid])
    costs: dict[str, list[list[float]]] = {"": [], KEPT_HEADERS: []}
    for number in range(rounds + 1):
        for headers in sorted(costs, reverse=number % 2 == 0):  # Neither kind always comes first.
            costs[headers].append(cost_us(plane.frontend.http, pids, streams, tokens, headers))
    plain, kept = costs[""][1:], costs[KEPT_HEADERS][1:]  # The first round warms up.
    for index, name in enumerate(("frontend", "worker")):
        ratios = [late[index] / early[index] for late, early in zip(kept, plain, strict=True)]
        usual, can_resume = (statistics.median(one[index] for one in kind) for kind in (plain, kept))
        print(
            f"{streams} streams, {name}: {usual:.1f} µs a token, {can_resume:.1f} µs if it can be resumed: "
            f"{statistics.median(ratios):.3f} times",
            flush=True,
        )


@click.command(help="Measure what it costs that a stream can be resumed.")
@click.option("--streams", default="64,256", show_default=True, help="Concurrent streams.")
@click.option("--tokens", type=click.IntRange(1), default=500, show_default=True, help="Tokens of an answer.")
@click.option("--rounds", type=click.IntRange(1), default=9, show_default=True)
def main(streams: str, tokens: int, rounds: int) -> None:
    with ForkServer() as fork_server, tempfile.TemporaryDirectory() as folder:
        plane = Plane(fork_server, Path(folder))
        try:
            options = ("--mocker-itl-ms=10", "--engine-request-limit=512")
            [worker] = run_on_loop(run_together([plane.worker(*options)]))
            for count in streams.split(","):
                measure(plane, worker, int(count), tokens, rounds)
        finally:
            plane.close()


if __name__ == "__main__":
    main()
