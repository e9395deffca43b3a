"""Replaces a file that only its owner may read."""

import os
from pathlib import Path


def replace_file(file: Path, content: bytes, *, mode: int = 0o600, like: os.stat_result | None = None) -> None:
    """Replace a file, so that a reader sees either the old content or the new one. Raises OSError.

    `like`: the new file gets this owner and this mode instead.
    """
    new = file.with_name(f".{file.name}.new")
    try:
        new.unlink(missing_ok=True)  # It may be left over, or somebody else's, who could go on writing into it.
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(content)
            opened.flush()
            if like is not None:
                os.fchown(descriptor, like.st_uid, like.st_gid)
                os.fchmod(descriptor, like.st_mode & 0o777)
            os.fsync(descriptor)
        new.replace(file)
    except OSError:
        new.unlink(missing_ok=True)
        raise
