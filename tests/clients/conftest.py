"""The plane that all client programs use, and what happens to a test whose tools are missing."""

import asyncio
import os
from collections.abc import Iterator

import pytest

from tests.clients.support.cluster import FULL, PATIENT, Cluster
from tests.integration.harness.plane.fork_server import ForkServer
from tests.integration.harness.plane.plane import Plane


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ForkServer() as processes:
        plane = Plane(processes, tmp_path_factory.mktemp("plane"), frontend=(PATIENT,))
        yield Cluster(plane, asyncio.run(plane.worker(*FULL)), [])
        plane.close()


def need(missing: list[str]) -> None:
    """Skip the test if a tool is missing; fail it if the variable CI is "true"."""
    if not missing:
        return
    message = f"not installed: {', '.join(missing)}"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)
