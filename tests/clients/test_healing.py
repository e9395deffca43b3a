"""Stock SDKs with the HTTP client of `unbroken-client` lose nothing when the frontend of their answer is killed.

The program for each SDK takes the name of a step and the addresses of two frontends. It prints two answers, of which
the second one began at the first frontend, and `begun` when this frontend is to be killed.
"""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.conftest import need
from tests.clients.support.cluster import MOCKER, PATIENT
from tests.clients.support.programs import running
from tests.clients.support.toolchains import HEALING, Client
from tests.integration.harness.metrics import read_metrics
from tests.integration.harness.plane.fork_server import ForkServer
from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.plane.processes import Process
from tests.integration.harness.waiting import until

STEPS = {"healing_python": ("stream", "whole", "async_stream", "async_whole"), "healing_node": ("stream", "whole")}
TOKENS = 240
"""Of one answer, with both of its choices."""


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plane]:
    with ForkServer() as processes:
        plane = Plane(processes, tmp_path_factory.mktemp("healing"), frontend=(PATIENT,))
        yield plane
        plane.close()


@pytest.fixture(scope="module")
def worker(plane: Plane) -> Process:
    return asyncio.run(plane.worker(*MOCKER))


@pytest.mark.parametrize(
    ("sdk", "step"),
    [pytest.param(sdk, step, id=f"{sdk.name}-{step}") for sdk in HEALING for step in STEPS[sdk.name]],
)
def test_answer_survives_the_kill_of_its_frontend(plane: Plane, worker: Process, sdk: Client, step: str) -> None:
    need(sdk.missing)
    command = [*sdk.command(), step]

    async def run() -> tuple[dict[str, Any], float]:
        first = plane.start_frontend(PATIENT)
        await until(lambda: first.has_found(worker))
        before = (await read_metrics(worker)).generated_tokens
        reported = {}
        async with running([*command, first.http, plane.frontend.http]) as process:
            assert process.stdout is not None
            while line := await process.stdout.readline():
                told = json.loads(line)
                reported[told.pop("step")] = told
                if "begun" in reported and first.status() is None:
                    await until(lambda: is_running(worker))
                    first.kill()
            assert await process.wait() == 0
        return reported, (await read_metrics(worker)).generated_tokens - before

    reported, generated = asyncio.run(run())

    assert reported["healed"] == reported["undisturbed"]
    assert reported["healed"]["usage"]["completion_tokens"] == TOKENS
    assert generated == 2 * TOKENS, "nothing was computed twice"


async def is_running(worker: Process) -> bool:
    return (await read_metrics(worker)).running > 0
