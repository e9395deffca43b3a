"""Scratch files: a path for libraries that read files only, also where no folder can be written."""

import os
import tempfile
from pathlib import Path

import pytest

from services.runtime.folders.scratch_file import scratch_file


def _no_memfd(*_: object) -> int:
    raise PermissionError(1, "Operation not permitted")


def test_file_has_the_content_while_the_block_runs() -> None:
    with scratch_file(b"content") as path:
        assert path.read_bytes() == b"content"

    assert not path.exists()


def test_file_can_be_extended_by_its_path() -> None:
    with scratch_file(b"content") as path:
        os.truncate(path, 1 << 40)

        assert path.stat().st_size == 1 << 40


def test_no_folder_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")

    with scratch_file(b"content") as path:
        assert path.read_bytes() == b"content"


def test_file_is_in_the_temporary_folder_where_memory_files_are_forbidden(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "memfd_create", _no_memfd)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    with scratch_file(b"content") as path:
        assert path.parent == tmp_path
        assert path.read_bytes() == b"content"

    assert not path.exists()


def test_error_says_what_to_do_where_nothing_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "memfd_create", _no_memfd)
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")

    with pytest.raises(OSError, match="TMPDIR"), scratch_file(b"content"):
        pass


def test_no_descriptor_is_left_open() -> None:
    before = len(os.listdir("/proc/self/fd"))

    with scratch_file(b"content"):
        pass

    assert len(os.listdir("/proc/self/fd")) == before
