"""Where temporary folders can be created, also in a container whose root is read-only."""

import tempfile
from pathlib import Path

from services.runtime.process import StartupError

SHARED_MEMORY = Path("/dev/shm")
"""A file system in memory, which containers have even if their root is read-only."""


def temporary_root(what: str) -> Path:
    """A folder in which temporary folders can be created. `what`: what they are for.

    Raises StartupError if there is none.
    """
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        if _is_writable(SHARED_MEMORY):
            return SHARED_MEMORY
        raise StartupError(
            f"no folder for {what} can be written: mount a writable one at /tmp, or name one in the variable TMPDIR"
        ) from error


def _is_writable(folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
