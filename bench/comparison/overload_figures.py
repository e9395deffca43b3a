"""What it costs to refuse a request while no worker has room, and how long the client waits for the refusal."""

import asyncio
import tempfile
from pathlib import Path

from bench.comparison.rounds import GRPC, HTTP_1, Figures
from bench.measure.errors import BenchError
from bench.storm import ITL_MS, LIMITS, Storms
from tests.integration.harness.plane.fork_server import ForkServer
from tests.integration.harness.plane.plane import Plane

CLIENTS = 64
KINDS = {GRPC: "grpc", HTTP_1: "stream"}
"""The names of the wires in the storm."""


def overload_figures(seconds: float) -> dict[str, Figures]:
    """Measure both wires, each for this long, with CLIENTS that ask again as soon as they are refused.

    Raises BenchError if a reply is neither an answer nor a proper refusal.
    """
    with ForkServer() as fork_server, tempfile.TemporaryDirectory() as folder:
        plane = Plane(fork_server, Path(folder))
        try:
            worker = asyncio.run(plane.worker(*LIMITS, f"--mocker-itl-ms={ITL_MS}"))
            storms = Storms(plane, worker, requests=0, rounds=1, clients=CLIENTS, seconds=seconds)
            return {name: refusal_figures(storms, kind) for name, kind in KINDS.items()}
        finally:
            plane.close()


def refusal_figures(storms: Storms, kind: str) -> Figures:
    seen = storms.refusals(kind)
    if not seen["is_honest"]:
        raise BenchError(f"replies under overload: {seen['replies']}")
    return {
        "cpu_us_each": seen["frontend_cpu_us_each"],
        "refused_ms_p50": seen["refused_ms"]["p50"],
        "refused_ms_p99": seen["refused_ms"]["p99"],
        "refused_per_s": seen["per_s"],
    }
