"""The folder for the sockets of a frontend's processes: private to its user, and removed when the supervisor ends."""

import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from services.frontend.processes.ipc import SUPERVISOR_SOCKET
from services.runtime.folders.temporary import temporary_root

FOLDER_PREFIX = "unbroken-processes-"
CONNECT_TIMEOUT_S = 0.1


@contextmanager
def private_folder() -> Iterator[Path]:
    """Create a folder that no other user can enter. Removes the folders of supervisors that were killed.

    Raises StartupError if no folder can be written.
    """
    root = temporary_root("the sockets of several processes")
    for left in root.glob(f"{FOLDER_PREFIX}*"):
        if _is_stale(left / SUPERVISOR_SOCKET):
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX, dir=root, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _is_stale(path: Path) -> bool:
    """Whether `path` is a socket on which no process listens. False if another user owns it."""
    with suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        if path.is_socket():  # Otherwise the supervisor may be about to create it.
            probe.settimeout(CONNECT_TIMEOUT_S)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                return True
    return False
