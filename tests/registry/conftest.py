"""Fixtures for the tests of the registry."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.registry.support import Etcd


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    """A running etcd, empty."""
    server = Etcd(tmp_path)
    server.start()
    server.wait_listening()
    yield server
    server.kill()
