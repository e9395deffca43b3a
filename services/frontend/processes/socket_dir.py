"""Where the sockets of a frontend's processes are: a folder that no other user can enter, and that none is left of."""

import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from services.frontend.processes.ipc import SUPERVISOR_SOCKET

FOLDERS = "unbroken-processes-"
"""What the names of the folders begin with."""
KNOCK_S_MAX = 0.1


@contextmanager
def private_folder() -> Iterator[Path]:
    """A folder for sockets that no other user can enter. First those go that killed supervisors have left behind."""
    for left in Path(tempfile.gettempdir()).glob(f"{FOLDERS}*"):
        if _is_deserted(left / SUPERVISOR_SOCKET):
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=FOLDERS, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _is_deserted(path: Path) -> bool:
    """Whether there is a socket where nobody listens."""
    with suppress(OSError), socket.socket(socket.AF_UNIX) as knocking:  # Of another user not even that can be seen.
        if path.is_socket():  # Else not yet.
            knocking.settimeout(KNOCK_S_MAX)
            try:
                knocking.connect(str(path))
            except ConnectionRefusedError:
                return True
    return False
