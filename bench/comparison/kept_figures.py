"""What it costs that a stream can be resumed, and what clients notice when they resume because their frontend died."""

import asyncio
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.clients.requests import KEPT_HEADERS, request_body
from bench.clients.stream_reader import read_answers
from bench.comparison.rounds import Figures
from bench.comparison.systems import Running
from bench.frontend_loss import WIRES, Loss, measure
from bench.measure.errors import BenchError
from bench.measure.process_usage import cpu_seconds_of
from tests.integration.harness.plane.fork_server import ForkServer
from tests.integration.harness.plane.plane import Plane

PAIRS = 3
"""Runs of each kind in a round, in turn."""


def kept_figures(running: Running, streams: int, tokens: int) -> tuple[Figures, Figures]:
    """What a token costs in a stream that can be resumed, and in one that cannot. Raises BenchError if one is lost."""
    groups = ([running.pid], running.workers)
    kinds = (KEPT_HEADERS, "")
    pairs = [[cost_us(running.url, groups, streams, tokens, kind) for kind in kinds] for _ in range(PAIRS)]
    kept, plain = [_medians(costs) for costs in zip(*pairs, strict=True)]
    return kept, plain


def _medians(costs: Sequence[Sequence[float]]) -> Figures:
    frontend_us, workers_us = [statistics.median(one) for one in zip(*costs, strict=True)]
    return {
        "cpu_us_per_token": frontend_us,
        "workers_us_per_token": workers_us,
        "all_us_per_token": frontend_us + workers_us,
    }


def cost_us(url: str, groups: Iterable[Sequence[int]], streams: int, tokens: int, headers: str) -> list[float]:
    """Processor time per token in µs, of each group of processes, while they serve streams with these headers."""
    before = [cpu_seconds_of(pids) for pids in groups]
    answers = read_answers(url, [request_body(tokens)] * streams, headers=headers)
    if not all(answer.is_complete for answer in answers):
        raise BenchError("an answer was not complete")
    after = [cpu_seconds_of(pids) for pids in groups]
    return [(late - early) / (streams * tokens) * 1e6 for late, early in zip(after, before, strict=True)]


def frontend_loss_figures(streams: int) -> Figures:
    """Kill a frontend under this many streams of each wire. Raises BenchError if a client gives up."""
    with ForkServer() as fork_server, tempfile.TemporaryDirectory() as folder:
        plane = Plane(fork_server, Path(folder))
        try:
            return figures_of(asyncio.run(measure(plane, streams, WIRES)))
        except ExceptionGroup as errors:
            raise BenchError(f"a client has given up: {errors.exceptions[0]}") from errors
        finally:
            plane.close()


def figures_of(loss: Loss) -> Figures:
    return {
        "gap_ms_p50": loss.gaps_ms["p50"],
        "gap_ms_p99": loss.gaps_ms["p99"],
        "gap_ms_max": loss.gaps_ms["max"],
        "calm_gap_ms_p99": loss.calm_gaps_ms["p99"],
        "streams": loss.streams,
        "resumed": loss.resumed,
        "complete": loss.complete,
        "equal": loss.equal,
        "prompt_tokens_twice": loss.prompt_tokens_twice,
        "tokens_twice": loss.tokens_twice,
    }
