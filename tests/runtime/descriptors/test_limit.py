"""The limit of open files is raised as far as allowed, and its shares leave room for the process itself."""

import resource
import subprocess
import sys
from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs

from services.runtime.descriptors.limit import (
    LIMIT_MAX,
    RESERVE_MAX,
    connections_max,
    is_reserved,
    raise_limit,
    reserve,
)


@pytest.fixture
def soft_limit() -> Iterator[int]:
    """A soft limit below the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = min(256, hard - 1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))
    yield low
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_soft_limit_is_raised_to_the_hard_one_and_logged(soft_limit: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]

    with capture_logs() as logs:
        raise_limit()

    wanted = min(hard, LIMIT_MAX)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == wanted
    assert [(line["event"], line["limit"], line["before"]) for line in logs] == [
        ("limit of open files raised", wanted, soft_limit)
    ]


def test_limit_that_is_high_enough_is_left_alone(soft_limit: int) -> None:
    raise_limit()

    with capture_logs() as logs:
        raise_limit()

    assert logs == []


def test_limit_that_cannot_be_raised_is_a_warning(soft_limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(resource, "setrlimit", forbidden)

    with capture_logs() as logs:
        raise_limit()

    assert (logs[0]["log_level"], logs[0]["limit"]) == ("warning", soft_limit)
    monkeypatch.undo()


@pytest.mark.parametrize("most", [16, 64, 256, 1024, 4096, 65_536, LIMIT_MAX])
def test_shares_add_up_to_the_limit(most: int) -> None:
    assert reserve(most) + connections_max(most) == most
    assert 0 < reserve(most) <= min(most // 4, RESERVE_MAX)


def test_highest_descriptors_are_reserved(soft_limit: int) -> None:
    first = soft_limit - reserve(soft_limit)

    assert [is_reserved(first - 1), is_reserved(first)] == [False, True]


def test_child_process_inherits_the_raised_limit(soft_limit: int) -> None:
    raise_limit()
    code = "import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.split()[0] == str(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
