"""Runs a command that the kernel kills when its parent process ends: `pdeathsig.py PARENT_PID PROGRAM ARGUMENT…`.

The command dies however the parent ends, so `kill -9` of a supervisor leaves no child behind. This process sets its own
parent-death signal and then becomes the command with exec. The alternative, code between fork and exec, is unsafe in a
parent with threads. Only Linux has this signal; on other systems the command runs without it, and ends only when the
parent stops it.

Run by path rather than as a module, so that it starts without importing the rest of the package.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1
"""Source: prctl(2)."""


def with_parent_death_signal(command: Sequence[str]) -> list[str]:
    """Wrap `command` so that it dies with the thread that starts it. Start it from the main thread."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def die_with(parent_pid: int) -> None:
    """Let the kernel kill this process when its parent ends. Exits if that has happened already."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:  # The parent ended before the signal was set.
        sys.exit(1)


def main() -> None:
    parent_pid, program = int(sys.argv[1]), sys.argv[2:]
    die_with(parent_pid)
    os.execv(program[0], program)


if __name__ == "__main__":
    main()
