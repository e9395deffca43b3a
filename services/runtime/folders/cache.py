"""The user's cache folder."""

import os
from pathlib import Path

from services.runtime.process import StartupError


def user_cache() -> Path:
    """`$XDG_CACHE_HOME/unbroken`, by default under `~/.cache`. It may not exist.

    Raises StartupError for a user without a home folder, such as a random user id in a container.
    """
    given = os.environ.get("XDG_CACHE_HOME")
    try:
        root = Path(given) if given else Path.home() / ".cache"
    except RuntimeError as error:
        raise StartupError(
            f"user {os.getuid()} has no home folder: set XDG_CACHE_HOME (or HOME) to a folder that it may write to"
        ) from error
    return root / "unbroken"
