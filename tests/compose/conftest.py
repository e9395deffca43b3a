"""The containers that all tests here use; they are gone afterwards, and a failure shows what they had said."""

from collections.abc import Generator, Iterator

import pytest

from tests.compose.project import Project, trouble


@pytest.fixture(scope="session", autouse=True)
def project() -> Iterator[Project]:
    """Not begun yet. Whatever becomes of it, nothing of it stays."""
    if (problem := trouble()) is not None:
        pytest.exit(problem, returncode=1)
    one = Project()
    try:
        yield one
    finally:
        one.down()


@pytest.fixture(scope="session")
def begun(project: Project, pytestconfig: pytest.Config) -> Project:
    """With a new image. That takes minutes at first, so what Docker says is seen at once."""
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    assert capture is not None
    with capture.global_and_fixture_disabled():
        project.begin()
    return project


@pytest.fixture
def cluster(begun: Project) -> Project:
    """All of it healthy, whatever the test before has killed."""
    begun.up()
    return begun


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What the containers had said when a test failed, though they be gone when it is reported."""
    report = yield
    if report.failed and (project := getattr(item, "funcargs", {}).get("project")) is not None:
        report.sections.append(("docker compose logs", project.logs()))
    return report
