"""Standard input, output and error: always open, and able to write any character."""

import contextlib
import io
import os
import sys
from typing import TextIO

UTF8 = "utf-8"
_MODES = {0: os.O_RDONLY, 1: os.O_WRONLY, 2: os.O_WRONLY}


def use_utf8() -> None:
    """Start this program again in Python's UTF-8 mode if the locale has another encoding: texts are UTF-8 here.

    Otherwise arguments and variables could not be sent. The mode is inherited by child processes.
    """
    if sys.getfilesystemencoding() != UTF8 and not sys.flags.utf8_mode:
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def prepare_streams() -> None:
    """Open the null device for each standard stream that is closed, and escape characters that cannot be encoded.

    Otherwise the next file or connection would take the place of the closed stream, and get the lines of the log.
    """
    for number, mode in _MODES.items():
        with contextlib.suppress(OSError):
            _open_if_closed(number, mode)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115 (they stay open)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _open_if_closed(number: int, mode: int) -> None:
    try:
        os.fstat(number)
    except OSError:
        opened = os.open(os.devnull, mode)
        if opened != number:
            os.dup2(opened, number)
            os.close(opened)
        os.set_inheritable(number, True)


def discard(stream: TextIO) -> None:
    """Send the rest of a standard stream to the null device, after a write has failed.

    What is in its buffer would fail once more when the interpreter ends, and change the exit status.
    """
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def flush_output() -> None:
    """Write what is buffered for the standard streams. Raises SystemExit if standard output cannot be written."""
    try:
        sys.stdout.flush()
    except OSError as error:
        discard(sys.stdout)
        raise SystemExit(f"error: cannot write to standard output: {error.strerror}") from None
    finally:
        try:
            sys.stderr.flush()
        except OSError:
            discard(sys.stderr)
