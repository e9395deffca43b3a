"""Measure what a stream that can be resumed costs beside one that cannot: processor time per token.

    python -m bench.kept_cost

Both kinds run in turn against the same processes. Each figure is the median of the ratios of neighbouring rounds.
"""

import json
import statistics
import tempfile
from pathlib import Path

import click

from bench.clients.stream_reader import read_answers
from bench.measure.errors import BenchError
from bench.measure.process_usage import cpu_seconds
from services.runtime.loop import run_on_loop
from tests.integration.harness.clients.send import run_together
from tests.integration.harness.plane.fork_server import ForkServer
from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.plane.processes import Process

KEPT = "X-On-Disconnect: continue\r\n"


def cost_us(plane: Plane, worker: Process, streams: int, tokens: int, headers: str) -> tuple[float, float]:
    """Processor time per token in µs, of the frontend and of the worker."""
    body = {"model": "mocker", "prompt": "x", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    before = [cpu_seconds(one.pid) for one in (plane.frontend, worker)]
    answers = read_answers(plane.frontend.http, [json.dumps(body).encode()] * streams, headers=headers)
    if not all(answer.is_complete for answer in answers):
        raise BenchError("an answer was not complete")
    after = [cpu_seconds(one.pid) for one in (plane.frontend, worker)]
    frontend, worker_us = [(late - early) / (streams * tokens) * 1e6 for late, early in zip(after, before, strict=True)]
    return frontend, worker_us


def measure(plane: Plane, worker: Process, streams: int, tokens: int, rounds: int) -> None:
    """Print the costs of both kinds, and their ratios."""
    plain, kept = [], []
    for number in range(rounds + 1):
        pair = [cost_us(plane, worker, streams, tokens, headers) for headers in ("", KEPT)]
        if number:  # The first round warms up.
            plain.append(pair[0])
            kept.append(pair[1])
    for index, name in enumerate(("frontend", "worker")):
        ratios = [late[index] / early[index] for late, early in zip(kept, plain, strict=True)]
        usual, can_resume = (statistics.median(one[index] for one in costs) for costs in (plain, kept))
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
