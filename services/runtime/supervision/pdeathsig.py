"""Runs a command that dies with its parent: `python tether.py PARENT_PID PROGRAM ARGUMENT…`.

The kernel kills the command when the parent ends, however it ends, so `kill -9` of a supervisor leaves nothing behind.
The wish is made by this process for itself, before it becomes the command: code between fork and exec, the other way to
make it, is unsafe in a parent with threads. Linux alone has it; elsewhere the command just runs, and only an orderly
end of the parent ends it.

Run by path rather than as a module, so that it starts without the rest of the package.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1
"""Source: prctl(2)."""


def tethered(command: Sequence[str]) -> list[str]:
    """`command` as a child of this process that dies with the thread that starts it: start it from the main thread."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def main() -> None:
    parent_pid, program = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:  # It ended before the wish was made.
        sys.exit(1)
    os.execv(program[0], program)


if __name__ == "__main__":
    main()
