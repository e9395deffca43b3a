"""Attack a frontend over HTTP/2, and measure the longest gap of the streams beside.

    python -m bench.attacks --seconds 3

Some clients stream, each token 20 ms after the one before. Meanwhile others do what costs a server something and a
client nothing, on some connections, again and again. For each attack a line of JSON says the longest gap of the
streams, the longest time that a health check took, CPU and memory of the frontend, and how many connections the
attackers used up. The first line is without an attack. The exit status is 1 if a gap was longer than GAP_MS_MAX, if a
gauge did not return to 0, or if a process logged an error.
"""

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import click

from bench.clients.h2_attacks import ATTACKS, attacking
from bench.clients.observers import Observation, observing
from bench.clients.requests import PATH, request_body
from bench.clients.wires import http_message
from bench.measure.process_usage import cpu_seconds
from bench.storm import GAUGES, bugs_in, memory_mib
from tests.integration.harness.plane.fork_server import ForkServer
from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.plane.processes import Process
from tests.integration.harness.waiting import until

GAP_MS_MAX = 100.0
"""The longest gap that an attack may make."""
ITL_MS = 20
WATCHED = 8
"""Running streams that are observed."""
SLOTS = 256
ENDLESS_TOKENS = 100_000
PROBE_EVERY_S = 0.05
NONE = "none"


@contextmanager
def _plane(fork_server: ForkServer, folder: Path) -> Iterator[tuple[Plane, Process]]:
    plane = Plane(fork_server, folder)
    try:
        limits = (f"--engine-request-limit={SLOTS}", "--request-queue-limit=16")
        yield plane, asyncio.run(plane.worker(*limits, f"--mocker-itl-ms={ITL_MS}"))
    finally:
        plane.close()


def measure(plane: Plane, worker: Process, name: str, connections: int, seconds: float) -> dict[str, Any]:
    """Attack for so long, and return the figures."""
    frontend = plane.frontend
    http = frontend.metrics_address
    message = http_message(PATH, request_body(ENDLESS_TOKENS))
    observation = Observation({"/live": (http, "/live")}, http, message, WATCHED, PROBE_EVERY_S)
    attack = nullcontext(dict[str, int]()) if name == NONE else attacking(http, name, connections)
    with observing(observation, WATCHED) as observed:
        before_s, began = cpu_seconds(frontend.pid), time.monotonic()
        with attack as used:
            time.sleep(seconds)
        cpu = (cpu_seconds(frontend.pid) - before_s) / (time.monotonic() - began)
    asyncio.run(until(lambda: _is_idle(frontend, worker)))
    return {
        "gap_ms_max": observed["stream_gap_ms_max"],
        "probe_ms_max": observed["probes_ms"]["/live"]["max"],
        "cores": round(cpu, 2),
        "rss_mib": memory_mib(frontend.pid, "VmHWM"),
        **used,
    }


async def _is_idle(*processes: Process) -> bool:
    gauges = [await Process.metric_at(one.metrics_address, gauge) for one in processes for gauge in GAUGES]
    return not sum(gauges)


@click.command(help="Attack a frontend over HTTP/2.", context_settings={"show_default": True})
@click.option("--seconds", type=click.FloatRange(0, min_open=True), default=3.0, help="How long each attack goes on.")
@click.option("--connections", type=click.IntRange(1), default=4, help="Connections that attack at a time.")
@click.option("--only", default="", help="Run only the attacks whose names contain this.")
def main(seconds: float, connections: int, only: str) -> None:
    figures = {}
    with (
        ForkServer() as fork_server,
        tempfile.TemporaryDirectory() as folder,
        _plane(fork_server, Path(folder)) as (plane, worker),
    ):
        for name in (NONE, *(name for name in ATTACKS if only in name)):
            figures[name] = measure(plane, worker, name, connections, seconds)
            print(name, json.dumps(figures[name]), flush=True)
        bugs = bugs_in(plane.frontend) + bugs_in(worker)
    late = [name for name, one in figures.items() if one["gap_ms_max"] > GAP_MS_MAX]
    print(json.dumps({"late": late, "bugs": bugs}))
    sys.exit(1 if late or bugs else 0)


if __name__ == "__main__":
    main()
