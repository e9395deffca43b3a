"""Both servers of the service Inference."""

import pytest

from tests.support.inference import served_by


@pytest.fixture(params=["grpc.aio", "own server"])
def both_servers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with each of the two servers that serve Inference."""
    monkeypatch.setattr(served_by, "own", request.param != "grpc.aio")
