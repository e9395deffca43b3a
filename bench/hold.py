"""Hold many slow streams on one frontend: measures memory per stream, CPU per token, and how evenly tokens arrive.

    python -m bench.hold --streams 10000 --seconds 60

Streams are opened at a bounded rate: over HTTP with a connection each, and then on another frontend over gRPC, with as
many on each of a few connections. Once each has received a token, all are held for `--seconds` at one token per second
each. An engine steps all of its streams at once, so tokens arrive in as many bursts per second as there are workers.
Then the clients hang up, and every gauge of the system must return to 0. Prints a report and writes it to `hold.md`,
and the figures to `hold.json`. The exit status is 1 if a stream was lost, a gauge did not return to 0, or a process
logged an error.
"""

import asyncio
import json
import math
import os
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from bench.clients.held_streams import HeldHttp, HeldRpcs, HeldStreams, HeldWire
from bench.clients.observers import Observation, observing
from bench.clients.requests import GRPC_PATH, PATH, grpc_request, request_body
from bench.clients.wires import http_message
from bench.compare import RESULTS
from bench.measure.conditions import command, machine
from bench.measure.process_usage import cpu_seconds
from bench.measure.quantiles import quantiles_ms
from bench.storm import GAUGES, bugs_in, memory_mib
from tests.integration.harness.clients.requests import Request
from tests.integration.harness.clients.send import answer
from tests.integration.harness.plane.fork_server import ForkServer
from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.plane.processes import Process
from tests.integration.harness.waiting import until

GAP_S_MAX = 1.5
"""A stream whose own p99 exceeds this is reported as slow."""
BEGIN_S_MAX = 30.0
QUIET_S_MAX = 60.0
SPARE_FILES = 200
PROBE_EVERY_S = 0.1
ENDLESS_TOKENS = 100_000
KIB_GOAL = 16.0
"""Memory of a frontend per stream."""
HTTP, GRPC = "HTTP/SSE", "gRPC"
WIRES: Mapping[str, tuple[str, Callable[[], HeldWire]]] = {
    HTTP: ("http", lambda: HeldHttp(http_message(PATH, request_body(ENDLESS_TOKENS)))),
    GRPC: ("grpc", lambda: HeldRpcs(GRPC_PATH, grpc_request(ENDLESS_TOKENS).SerializeToString())),
}
"""For each wire: the name of the frontend's address, and what a connection speaks."""


@dataclass(frozen=True)
class Usage:
    """Resources used by a process: CPU since its start, memory now."""

    cpu_s: float
    rss_mib: float

    @classmethod
    def of(cls, process: Process) -> "Usage":
        return cls(cpu_seconds(process.pid), memory_mib(process.pid, "VmRSS"))


@dataclass(frozen=True)
class Figures:
    """The figures of one run. A gap is the time between two tokens of one stream.

    `gap_ms`: over all streams together. `own_p99_ms`: over the streams' own p99 values. `slow_streams`: streams whose
    own p99 exceeds GAP_S_MAX. `cores`: CPU seconds per second. `left`: the sum of the gauges at the end.
    """

    streams: int
    lost: Mapping[str, int]
    tokens: int
    rss_mib: Mapping[str, float]
    kib_per_stream: float
    cpu_us_per_token: float
    cores: float
    gap_ms: Mapping[str, float]
    own_p99_ms: Mapping[str, float]
    slow_streams: int
    live_ms: Mapping[str, float]
    worker_rss_mib: Sequence[float]
    worker_cpu_us_per_token: float
    left: float
    bugs: Sequence[str]

    @property
    def is_clean(self) -> bool:
        return not (self.lost or self.left or self.bugs)


@dataclass(frozen=True)
class Options:
    """What the command line says. `connections`: over gRPC. `rate`: streams to open per second."""

    streams: int
    connections: int
    seconds: float
    workers: int
    rate: float
    itl_ms: float

    def per_connection(self, wire: str) -> int:
        return 1 if wire == HTTP else math.ceil(self.streams / self.connections)


@dataclass(frozen=True)
class Hold:
    """A plane and the streams to hold on it."""

    plane: Plane
    workers: Sequence[Process]
    wire: str
    options: Options

    @property
    def _frontend(self) -> Process:
        return self.plane.frontend

    def run(self) -> Figures:
        asyncio.run(answer(self.plane.frontend, Request(max_tokens=1)))  # Loads what only the first request loads.
        asked, probed = self.options, self._frontend.metrics_address
        at, wire = WIRES[self.wire]
        empty = Usage.of(self._frontend)
        with HeldStreams(self._frontend.ready[at], wire, asked.per_connection(self.wire)) as held:
            held.open(asked.streams, asked.rate)
            held.wait_begun(BEGIN_S_MAX)
            with observing(Observation({"/live": (probed, "/live")}, probed, b"", 0, PROBE_EVERY_S), 0) as observed:
                before, began = self._usages(), time.monotonic()
                held.reset()
                held.read(asked.seconds)
                gaps_s, elapsed_s, after = held.gaps_s(), time.monotonic() - began, self._usages()
        left = asyncio.run(self._left())
        used_s, *workers_s = [now.cpu_s - then.cpu_s for now, then in zip(after, before, strict=True)]
        tokens = max(held.tokens, 1)
        return Figures(
            streams=asked.streams,
            lost=dict(held.errors),
            tokens=held.tokens,
            rss_mib={"before": empty.rss_mib, "held": after[0].rss_mib, "after": Usage.of(self._frontend).rss_mib},
            kib_per_stream=round((after[0].rss_mib - empty.rss_mib) * 1024 / asked.streams, 2),
            cpu_us_per_token=round(used_s / tokens * 1e6, 1),
            cores=round(used_s / elapsed_s, 3),
            **gap_figures(gaps_s),
            live_ms=observed["probes_ms"]["/live"],
            worker_rss_mib=[usage.rss_mib for usage in after[1:]],
            worker_cpu_us_per_token=round(sum(workers_s) / tokens * 1e6, 1),
            left=left,
            bugs=[line for one in (self._frontend, *self.workers) for line in bugs_in(one)],
        )

    def _usages(self) -> list[Usage]:
        return [Usage.of(one) for one in (self._frontend, *self.workers)]

    async def _left(self) -> float:
        """Return the sum of all request gauges, once it is 0 or QUIET_S_MAX has passed."""
        with suppress(TimeoutError):
            await until(self._is_idle, QUIET_S_MAX)
        return await self._gauges()

    async def _is_idle(self) -> bool:
        return not await self._gauges()

    async def _gauges(self) -> float:
        processes = (self._frontend, *self.workers)
        return sum([await one.metric(gauge) for one in processes for gauge in GAUGES])


def gap_figures(gaps_s: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return the fields of `Figures` that concern gaps. `gaps_s`: the gaps of each stream."""
    own_p99_ms = [quantiles_ms(gaps)["p99"] for gaps in gaps_s]
    return {
        "gap_ms": quantiles_ms([gap for gaps in gaps_s for gap in gaps]),
        "own_p99_ms": quantiles_ms([own / 1e3 for own in own_p99_ms]),
        "slow_streams": sum(own > GAP_S_MAX * 1e3 for own in own_p99_ms),
    }


def run(fork_server: ForkServer, folder: Path, wire: str, asked: Options) -> Figures:
    """Start a plane and hold streams on it."""
    plane = Plane(fork_server, folder)
    options = (
        f"--engine-request-limit={asked.streams}",
        f"--mocker-itl-ms={asked.itl_ms}",
        "--mocker-kv-block-tokens=1024",
        "--mocker-prefill-chunk-tokens=1000000",  # Otherwise a step would start at most about a hundred streams.
    )
    try:
        started = [asyncio.run(plane.worker(*options)) for _ in range(asked.workers)]
        return Hold(plane, started, wire, asked).run()
    finally:
        plane.close()


def raise_file_limit(number: int) -> None:
    """Raise the limit of open files for this process and its children. Exits if the system does not allow it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < number:
        if hard != resource.RLIM_INFINITY and hard < number:
            sys.exit(
                f"error: {number} open files are needed, and {hard} are allowed: "
                f"raise the limit with ulimit -Hn {number}"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))


def document(runs: Mapping[str, Figures], about: Mapping[str, str]) -> str:
    """Return the report. `runs`: by wire. `about`: what was measured, where and how, one line each."""
    facts = "\n".join(f"- {name}: {value}" for name, value in about.items())
    columns = [lines_of(figures) for figures in runs.values()]
    rows = [
        ["figure", *runs],
        ["---"] * (1 + len(runs)),
        *([name, *(one[name] for one in columns)] for name in columns[0]),
    ]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"# Held streams\n\n{facts}\n\n{table}\n"


def lines_of(figures: Figures) -> dict[str, str]:
    """Return the lines of one column."""
    rss, gap, own, live = figures.rss_mib, figures.gap_ms, figures.own_p99_ms, figures.live_ms
    return {
        "streams held, streams lost": f"{figures.streams:,}, {sum(figures.lost.values())}",
        "tokens": f"{figures.tokens:,}",
        "frontend memory (RSS): before, with the streams, after": f"{rss['before']}, {rss['held']}, {rss['after']} MiB",
        f"memory per stream, which is to be at most {KIB_GOAL:g} KiB": f"{figures.kib_per_stream} KiB",
        "frontend CPU": f"{figures.cpu_us_per_token} µs per token, {figures.cores:.1%} of a core",
        "time between two tokens: p50, p99, maximum": f"{gap['p50']}, {gap['p99']}, {gap['max']} ms",
        "each stream's own p99: median, maximum": f"{own['p50']}, {own['max']} ms",
        f"streams whose own p99 exceeds {GAP_S_MAX} s": str(figures.slow_streams),
        "latency of `/live` meanwhile: p50, p99, maximum": f"{live['p50']}, {live['p99']}, {live['max']} ms",
        "workers' memory (RSS)": ", ".join(f"{mib} MiB" for mib in figures.worker_rss_mib),
        "workers' CPU, including the mocker's own work": f"{figures.worker_cpu_us_per_token} µs per token",
        "requests still counted after the clients hung up": f"{figures.left:.0f}",
    }


def about(asked: Options, load_before: float) -> dict[str, str]:
    """Return what a reader must know about how the figures were measured."""
    mockers = f"{asked.workers} mockers at {asked.itl_ms:g} ms per token"
    connections = (
        f"over HTTP one each, over gRPC {asked.per_connection(GRPC)} on each of {asked.connections} connections"
    )
    return {
        "machine": machine(),
        "Python": platform.python_version(),
        "load average before": f"{load_before:.2f}",
        "setup": f"{mockers}, held for {asked.seconds:g} s, a frontend for each wire; clients on the same machine",
        "streams": connections,
        "command": command("bench.hold"),
    }


@click.command(help="Hold many slow streams on one frontend.", context_settings={"show_default": True})
@click.option("--streams", type=click.IntRange(1), default=10_000, help="At a time.")
@click.option("--wire", "wires", type=click.Choice(list(WIRES)), multiple=True, default=list(WIRES), help="Repeatable.")
@click.option("--connections", type=click.IntRange(1), default=100, help="Of the streams over gRPC.")
@click.option("--seconds", type=click.FloatRange(0, min_open=True), default=60.0, help="How long to hold the streams.")
@click.option("--workers", type=click.IntRange(1), default=2)
@click.option("--rate", type=click.FloatRange(0, min_open=True), default=500.0, help="Streams to open per second.")
@click.option(
    "--itl-ms", type=click.FloatRange(0, min_open=True), default=1000.0, help="Time between two tokens of a stream."
)
@click.option("--results", type=click.Path(path_type=Path, file_okay=False), default=RESULTS, help="Output folder.")
def main(results: Path, wires: Sequence[str], **options: Any) -> None:
    asked = Options(**options)
    raise_file_limit(asked.streams + SPARE_FILES)
    load_before = os.getloadavg()[0]
    runs: dict[str, Figures] = {}
    with ForkServer() as fork_server:
        for wire in wires:
            with tempfile.TemporaryDirectory() as folder:
                runs[wire] = run(fork_server, Path(folder), wire, asked)
    facts = about(asked, load_before)
    text = document(runs, facts)
    results.mkdir(parents=True, exist_ok=True)
    (results / "hold.md").write_text(text, encoding="utf-8")
    whole = {"about": facts, "runs": {wire: asdict(figures) for wire, figures in runs.items()}}
    (results / "hold.json").write_text(json.dumps(whole, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    click.echo(text)
    for wire, figures in runs.items():
        for line in (*(f"lost {number}: {why}" for why, number in figures.lost.items()), *figures.bugs):
            click.echo(f"{wire}: {line}", err=True)
    sys.exit(0 if all(figures.is_clean for figures in runs.values()) else 1)


if __name__ == "__main__":
    main()
