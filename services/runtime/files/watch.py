"""Keeps what files hold up to date, while they may change at any time."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from services.runtime.process import StartupError

Loaded = TypeVar("Loaded")


class WatchedFiles(ABC, Generic[Loaded]):
    """What some files hold together. Files that cannot be used leave the last ones in use.

    `loaded`: what those in use hold.
    """

    def __init__(self, files: Sequence[Path], load: Callable[[], Loaded], look_s: float) -> None:
        """`load`: reads the files; raises StartupError if they cannot be used, as this does then.

        `look_s`: how often the files are looked at. A change counts from the second look at it.
        """
        self._files = files
        self._load = load
        self._look_s = look_s
        self._used = self._seen = _state_of(files)
        self._fault = ""  # Why the files cannot be used, as it was reported.
        self.loaded = load()

    @abstractmethod
    def on_used(self) -> None:
        """New files are in use."""

    @abstractmethod
    def on_fault(self, why: str) -> None:
        """The new files cannot be used. Called once for each reason."""

    async def run(self) -> None:
        """Look at the files until the task is cancelled."""
        while True:
            await asyncio.to_thread(self.look)  # A file on a network may keep it waiting.
            await asyncio.sleep(self._look_s)

    def look(self) -> None:
        """Read the files if they have changed since they were used, and are the same as at the last look.

        So files that are being written are not taken for whole. Kubernetes changes what links refer to, so the inode
        counts as well. Files that cannot be used are read at each look: the reason may pass without a change of them.
        """
        before, self._seen = self._seen, _state_of(self._files)
        if self._seen != before or self._seen == self._used:
            return
        try:
            loaded = self._load()
        except StartupError as error:
            if str(error) != self._fault:
                self._fault = str(error)
                self.on_fault(self._fault)
            return
        if _state_of(self._files) == self._seen:  # Otherwise they have changed while they were read.
            self.loaded, self._used, self._fault = loaded, self._seen, ""
            self.on_used()


def _state_of(files: Sequence[Path]) -> tuple[tuple[int, ...] | None, ...]:
    return tuple(map(_stat, files))


def _stat(file: Path) -> tuple[int, ...] | None:
    """What changes with the file; None if there is none."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size
