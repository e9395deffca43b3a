"""WatchedFiles: new files are taken over whole, and files that cannot be used leave the last ones in use."""

from collections.abc import Callable
from pathlib import Path

import pytest

from services.runtime.files.watch import WatchedFiles
from services.runtime.process import StartupError


class Watched(WatchedFiles[str]):
    """Two files, of which the texts are joined.

    `events`: what happened, in order. `during`: called while they are read. Texts that follow each other differ in
    length: the clock of file times is too coarse to tell two quick writes.
    """

    def __init__(self, folder: Path) -> None:
        self.files = [folder / "a", folder / "b"]
        self.events: list[str] = []
        self.during: Callable[[], object] = lambda: None
        self.write("a", "b")
        super().__init__(self.files, self._read, 1.0)

    def write(self, *texts: str) -> None:
        for file, text in zip(self.files, texts, strict=True):
            file.write_text(text)

    def _read(self) -> str:
        text = "".join([file.read_text() for file in self.files])
        self.during()
        if "!" in text:
            raise StartupError(f"{text} cannot be used")
        return text

    def on_used(self) -> None:
        self.events.append(self.loaded)

    def on_fault(self, why: str) -> None:
        self.events.append(why)


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


def test_files_at_the_start_are_used_without_a_word(watched: Watched) -> None:
    watched.look()
    watched.look()

    assert (watched.loaded, watched.events) == ("ab", [])


def test_change_counts_at_the_second_look_and_once(watched: Watched) -> None:
    watched.write("cc", "d")

    watched.look()
    assert watched.loaded == "ab", "the files may still be written"
    watched.look()
    watched.look()

    assert (watched.loaded, watched.events) == ("ccd", ["ccd"])


def test_files_that_change_between_looks_wait_until_they_rest(watched: Watched) -> None:
    for size in range(2, 5):
        watched.write("c" * size, "d")
        watched.look()

    assert watched.loaded == "ab"
    watched.look()
    assert watched.loaded == "ccccd"


def test_files_that_change_while_they_are_read_are_read_again(watched: Watched) -> None:
    watched.write("cc", "d")
    watched.during = lambda: watched.write("eee", "ff")
    watched.look()
    watched.look()
    assert (watched.loaded, watched.events) == ("ab", [])

    watched.during = lambda: None
    watched.look()
    watched.look()

    assert (watched.loaded, watched.events) == ("eeeff", ["eeeff"])


def test_files_that_cannot_be_used_are_told_of_once_for_each_reason_and_tried_again(watched: Watched) -> None:
    watched.write("!!", "d")
    for _ in range(4):
        watched.look()
    assert (watched.loaded, watched.events) == ("ab", ["!!d cannot be used"])

    watched.write("ccc", "d")
    watched.look()
    watched.look()

    assert watched.events == ["!!d cannot be used", "cccd"]


def test_file_that_cannot_be_used_at_the_start_is_an_error(tmp_path: Path) -> None:
    class Broken(Watched):
        def write(self, *_: str) -> None:
            super().write("!", "b")

    with pytest.raises(StartupError, match="!b cannot be used"):
        Broken(tmp_path)
