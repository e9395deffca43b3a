"""The state folder of a local cluster: a lock file, and `cluster.json` with the pids and addresses of its processes."""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from services.runtime.folders.cache import user_cache
from services.runtime.process import StartupError

STATE_FILE = "cluster.json"
LOCK_FILE = "lock"


def default_folder() -> Path:
    """One folder per user, so that other programs can find `cluster.json`. Raises StartupError: see `user_cache`."""
    return user_cache() / "run"


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Create the folder and lock it. `cluster.json` is removed on entry and on exit.

    Raises StartupError if another cluster holds the lock or the folder cannot be used.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / LOCK_FILE).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # Released by the system when the process ends.
            (folder / STATE_FILE).unlink(missing_ok=True)
            try:
                yield
            finally:
                (folder / STATE_FILE).unlink(missing_ok=True)
    except BlockingIOError:
        raise StartupError(
            f"another cluster runs in {folder}: stop it, or use another --state-dir and other ports"
        ) from None
    except OSError as error:
        raise StartupError(
            f"cannot use the state folder {folder}: {error.strerror}; give one that can be written with --state-dir"
        ) from error


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Replace `cluster.json` atomically: a reader sees either the old state or the new one."""
    scratch = folder / f"{STATE_FILE}.new"
    scratch.write_text(json.dumps(state, indent=2) + "\n")
    scratch.replace(folder / STATE_FILE)
