"""The plane that all clients use, and how a missing toolchain is told."""

import os

import pytest

from tests.integration.conftest import nursery_process, start_plane

__all__ = ["need", "nursery_process", "start_plane"]


def need(missing: list[str]) -> None:
    """Skip the test if something is missing; where CI is "true", fail it."""
    if not missing:
        return
    message = f"not installed: {', '.join(missing)}"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)
