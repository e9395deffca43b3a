"""A file for libraries that read from a path only: in memory where the system allows it, so it needs no folder."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NAME = "unbroken"


@contextmanager
def scratch_file(content: bytes) -> Iterator[Path]:
    """Yield the path of a new writable file with `content`. It is removed at the end of the block.

    Without memfd_create or /proc, the file is in the folder for temporary files. Raises OSError, whose text says what
    to do, if that cannot be written either.
    """
    if (file := _in_memory()) is not None:
        with os.fdopen(file, "wb") as stream:
            stream.write(content)
            stream.flush()
            yield _path_of(file)
        return
    with _on_disk() as stream:
        stream.write(content)
        stream.flush()
        yield Path(stream.name)


def _in_memory() -> int | None:
    """The descriptor of a file in memory, or None if the system has none that can be opened by a path."""
    if not hasattr(os, "memfd_create"):
        return None
    try:
        file = os.memfd_create(_NAME)
    except OSError:  # Sandboxes may forbid it.
        return None
    if _path_of(file).exists():
        return file
    os.close(file)
    return None


def _path_of(file: int) -> Path:
    return Path(f"/proc/self/fd/{file}")


def _on_disk() -> "tempfile._TemporaryFileWrapper[bytes]":
    try:
        return tempfile.NamedTemporaryFile(prefix=f"{_NAME}-")
    except OSError as error:
        raise OSError(
            error.errno,
            f"no file can be written in memory or in a folder for temporary files ({error.strerror}): mount /proc, or"
            " name a writable folder in the variable TMPDIR",
        ) from error
