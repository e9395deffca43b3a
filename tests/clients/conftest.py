"""The plane that all clients use, and how a missing toolchain is told."""

import asyncio
import os

import pytest

from tests.clients.cluster import FULL, Cluster
from tests.integration.conftest import Start, nursery_process, start_plane

__all__ = ["cluster", "need", "nursery_process", "start_plane"]


@pytest.fixture(scope="module")
def cluster(start_plane: Start) -> Cluster:
    plane = start_plane()
    asyncio.run(plane.worker(*FULL))
    return Cluster(plane, [])


def need(missing: list[str]) -> None:
    """Skip the test if something is missing; where CI is "true", fail it."""
    if not missing:
        return
    message = f"not installed: {', '.join(missing)}"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)
