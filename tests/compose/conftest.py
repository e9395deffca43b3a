"""The containers of these tests. They are removed afterwards, and a failed test shows their logs."""

from collections.abc import Generator, Iterator

import pytest

from tests.compose.project import Project, trouble


@pytest.fixture(scope="session", autouse=True)
def project() -> Iterator[Project]:
    """Yield a project that has not been started, and remove everything of it afterwards."""
    if (problem := trouble()) is not None:
        pytest.exit(problem, returncode=1)
    one = Project()
    try:
        yield one
    finally:
        one.down()


@pytest.fixture(scope="session")
def begun(project: Project, pytestconfig: pytest.Config) -> Project:
    """Build a new image and start the project. The first build takes minutes, so Docker's output is shown at once."""
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    assert capture is not None
    with capture.global_and_fixture_disabled():
        project.begin()
    return project


@pytest.fixture
def cluster(begun: Project) -> Project:
    """Return the project with all containers healthy, whatever the previous test has killed."""
    begun.up()
    return begun


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the logs of the containers to the report of a failed test, because they may be gone when it is printed."""
    report = yield
    if report.failed and (project := getattr(item, "funcargs", {}).get("project")) is not None:
        report.sections.append(("docker compose logs", project.logs()))
    return report
