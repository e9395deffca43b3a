"""Temporary folders are in memory where the usual places cannot be written."""

import tempfile
from pathlib import Path

import pytest

from services.runtime.folders import temporary
from services.runtime.folders.temporary import temporary_root
from services.runtime.process import StartupError


def no_folder() -> str:
    raise FileNotFoundError(2, "No usable temporary directory found")


def test_usual_folder_is_taken_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    assert temporary_root("anything") == tmp_path


def test_shared_memory_is_taken_where_nothing_else_can_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", no_folder)
    monkeypatch.setattr(temporary, "SHARED_MEMORY", tmp_path)

    assert temporary_root("anything") == tmp_path


def test_error_says_what_to_do_where_nothing_can_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", no_folder)
    monkeypatch.setattr(temporary, "SHARED_MEMORY", tmp_path / "missing")

    with pytest.raises(StartupError, match=r"no folder for sockets can be written: mount .* TMPDIR"):
        temporary_root("sockets")
