"""Fixtures of the integration tests: one nursery for all, planes for modules or tests."""

from collections.abc import Callable, Iterator

import pytest

from tests.integration.plane import Nursery, Plane, nursery

Start = Callable[..., Plane]


@pytest.fixture(scope="session")
def nursery_process() -> Iterator[Nursery]:
    with nursery() as one:
        yield one


@pytest.fixture(scope="module")
def start_plane(nursery_process: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts planes that end with the module's tests. Options: frontend=(…), registry=(…)."""
    planes: list[Plane] = []

    def start(**options: tuple[str, ...]) -> Plane:
        planes.append(Plane(nursery_process, tmp_path_factory.mktemp("plane"), **options))
        return planes[-1]

    yield start
    for plane in planes:
        plane.close()


@pytest.fixture(scope="module")
def plane(start_plane: Start) -> Plane:
    """One plane for a module whose tests leave it as they found it."""
    return start_plane()
