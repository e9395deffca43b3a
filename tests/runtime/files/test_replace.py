"""replace_file: readers see the old file or the new one, and nobody else can write into it."""

import os
from pathlib import Path

import pytest

from services.runtime.files.replace import replace_file


def mode_of(file: Path) -> int:
    return file.stat().st_mode & 0o777


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_file_gets_its_content_and_its_mode(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "file"
    file.write_text("old")

    replace_file(file, b"new", mode=mode)

    assert (file.read_bytes(), mode_of(file)) == (b"new", mode)
    assert list(tmp_path.iterdir()) == [file]


def test_file_can_be_like_the_one_before(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    file.chmod(0o640)

    replace_file(file, b"new", like=file.stat())

    assert mode_of(file) == 0o640


def test_file_that_somebody_else_has_prepared_is_not_written_into(tmp_path: Path) -> None:
    file, prepared = tmp_path / "file", tmp_path / ".file.new"
    prepared.write_text("")
    with prepared.open("a") as theirs:
        replace_file(file, b"secret")
        theirs.write("more")

    assert file.read_bytes() == b"secret"


def test_reader_of_the_old_file_goes_on_with_it(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    with file.open() as opened:
        replace_file(file, b"new")

        assert opened.read() == "old"


def test_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("old")

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        replace_file(file, b"new")

    assert [one.read_text() for one in tmp_path.iterdir()] == ["old"]
