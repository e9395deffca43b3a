"""What /openapi.json allows is answered as it describes, and what it forbids is refused: no 5xx, no other status or
shape.

Schemathesis generates requests from the served document. Most of them name a model that does not exist or are invalid
elsewhere, so two more runs are less random: see the hooks in the folder `surface`. SURFACE_TIMES multiplies the number
of random cases, and SURFACE_SEED selects others. The cases at the limits of each field are always the same.
"""

import asyncio
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.clients.support.cluster import PATIENT
from tests.clients.support.toolchains import SURFACE
from tests.integration.harness.plane.fork_server import ForkServer
from tests.integration.harness.plane.plane import Plane

CASES_MIN = 5000
TIMES = int(os.environ.get("SURFACE_TIMES", "1"))
SEED = os.environ.get("SURFACE_SEED", "1")
"""Fixed, so that a failure must come from a change."""
RUN_S_MAX = 600.0 * TIMES
RESPONSE_S_MAX = 20
"""Longer than any answer of the mocker takes, even on a busy machine."""
FAST = ("--mocker-itl-ms=0.1",)
WORKERS = 2


@dataclass(frozen=True)
class Run:
    """`hooks`: a module of the folder `surface`. `examples`: random cases per call, besides those at the limits."""

    hooks: str
    mode: str
    examples: int
    calls: str = "."


RUNS = (
    Run("served", "all", 150),
    Run("named", "negative", 400, "completions$"),
    Run("answered", "positive", 500, "completions$"),
)


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Plane]:
    with ForkServer() as processes:
        plane = Plane(processes, tmp_path, frontend=(PATIENT,))
        yield plane
        plane.close()


def test_api_behaves_as_the_openapi_document_says(plane: Plane, tmp_path: Path) -> None:
    command = SURFACE.command()

    async def scenario() -> list[dict[str, Any]]:
        for _ in range(WORKERS):
            await plane.worker(*FAST)
        document = f"{plane.frontend.http}/openapi.json"
        async with asyncio.timeout(RUN_S_MAX), asyncio.TaskGroup() as group:
            runs = [group.create_task(report_of(run, command, document, tmp_path)) for run in RUNS]
        return [run.result() for run in runs]

    reports = asyncio.run(scenario())

    assert sum(report["test_cases"]["generated"] for report in reports) >= CASES_MIN
    assert share_answered(reports[-1]) > 0.6


async def report_of(run: Run, command: list[str], document: str, folder: Path) -> dict[str, Any]:
    """Run Schemathesis and return its report. Fails if it has found anything."""
    report = folder / f"{run.hooks}.json"
    options = (
        *(document, f"--seed={SEED}", f"--mode={run.mode}", f"--max-examples={run.examples * TIMES}"),
        *(f"--include-path-regex={run.calls}", f"--max-response-time={RESPONSE_S_MAX}"),
        *("--report=json", f"--report-json-path={report}", "--no-color", "--output-sanitize=false"),
    )
    environment = os.environ | {"SCHEMATHESIS_HOOKS": run.hooks, "PYTHONPATH": str(SURFACE.program)}
    log = folder / f"{run.hooks}.log"
    with log.open("wb") as said:
        process = await asyncio.create_subprocess_exec(
            *command, *options, cwd=folder, env=environment, stdout=said, stderr=said
        )
        try:
            status = await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert status == 0, log.read_text()
    results: dict[str, Any] = json.loads(report.read_text())
    assert results["complete"], results
    return results


def share_answered(report: dict[str, Any]) -> float:
    """Return the share of the requests to the model that were answered."""
    counts = [phase for phases in report["valid_rates"].values() for phase in phases.values()]
    asked = sum(sum(count.values()) for count in counts)
    answered: int = sum(count["accepted"] for count in counts)
    return answered / asked
