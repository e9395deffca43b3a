"""Fixtures of the integration tests: one fork server for all tests, planes for modules or tests.

A module or test marked `on_both_engines` or `on_trtllm` runs with workers of these engines; all others use the mocker.
"""

from collections.abc import Callable, Iterator

import pytest

from tests.integration.harness.plane.engines import CONTEXT_LENGTH, Engine, Mocker, TrtLlm
from tests.integration.harness.plane.fork_server import ForkServer
from tests.integration.harness.plane.plane import Plane
from tests.support.model_folder import make_model_folder

on_both_engines = pytest.mark.parametrize("engine", ["mocker", "trtllm"], indirect=True, scope="module")
on_trtllm = pytest.mark.parametrize("engine", ["trtllm"], indirect=True, scope="module")

Start = Callable[..., Plane]


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer() as one:
        yield one


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """The engine of the workers."""
    if getattr(request, "param", "mocker") == "mocker":
        return Mocker()
    return TrtLlm(make_model_folder(tmp_path_factory.mktemp("model"), context_length=CONTEXT_LENGTH))


@pytest.fixture(scope="module")
def start_plane(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory, engine: Engine) -> Iterator[Start]:
    """Yield a function that starts planes. They end with the module. Options: frontend=(…), registry=(…)."""
    planes: list[Plane] = []

    def start(**options: tuple[str, ...]) -> Plane:
        planes.append(Plane(fork_server, tmp_path_factory.mktemp("plane"), engine=engine, is_patient=True, **options))
        return planes[-1]

    yield start
    for plane in planes:
        plane.close()


@pytest.fixture(scope="module")
def plane(start_plane: Start) -> Plane:
    """One plane for all tests of a module. Each test must leave it as it was."""
    return start_plane()
