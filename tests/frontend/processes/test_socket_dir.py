"""The socket folder is private, and it is removed, even after its supervisor was killed."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.frontend.processes.ipc import SUPERVISOR_SOCKET
from services.frontend.processes.socket_dir import FOLDER_PREFIX, private_folder
from tests.frontend.processes.support import short_folder

NOBODY = 65534


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder in which temporary folders are created."""
    with short_folder() as folder:
        monkeypatch.setattr("tempfile.tempdir", str(folder))
        yield folder


@contextmanager
def without_privileges() -> Iterator[None]:
    """Run as a user without access to other users' folders."""
    mine = os.geteuid()
    os.seteuid(mine or NOBODY)
    try:
        yield
    finally:
        os.seteuid(mine)


def test_folder_is_private_and_removed_at_the_end(temporary: Path) -> None:
    with private_folder() as folder:
        assert folder.parent == temporary
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "one.sock").touch()

    assert not list(temporary.iterdir())


def test_folders_of_killed_supervisors_are_removed_and_others_stay(temporary: Path) -> None:
    stale, active, new, foreign = (
        temporary / f"{FOLDER_PREFIX}{name}" for name in ("stale", "active", "new", "foreign")
    )
    for folder in (stale, active, new, foreign):
        folder.mkdir()
    (foreign / SUPERVISOR_SOCKET).touch()  # Not a socket.
    with socket.socket(socket.AF_UNIX) as left, socket.socket(socket.AF_UNIX) as listening:
        left.bind(str(stale / SUPERVISOR_SOCKET))
        listening.bind(str(active / SUPERVISOR_SOCKET))
        listening.listen()
        with private_folder() as folder:
            assert set(temporary.iterdir()) == {active, new, foreign, folder}


def test_folder_of_another_user_is_ignored(temporary: Path) -> None:
    theirs = temporary / f"{FOLDER_PREFIX}theirs"
    theirs.mkdir(mode=0)
    temporary.chmod(0o777)
    with without_privileges(), private_folder() as folder:
        assert set(temporary.iterdir()) == {theirs, folder}
