"""Starts the server, and reads its memory."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.http.support import Server

ROOT = Path(__file__).resolve().parents[4]
MIB = 1024 * 1024


@dataclass
class Attacked:
    """The server's process. `log`: what it has written to standard error."""

    process: "subprocess.Popen[str]"
    port: int
    log: Path

    @property
    def server(self) -> Any:
        """For `connected`."""
        return Server(self.port, None, None, None, None)  # type: ignore[arg-type]

    def _memory(self, field: str) -> int:
        """A memory field of the process, in bytes. Source: proc_pid_status(5)."""
        _, _, rest = Path(f"/proc/{self.process.pid}/status").read_text().partition(f"{field}:")
        return int(rest.split()[0]) * 1024

    def forget_peak(self) -> int:
        """Returns the resident memory now. The peak is counted from here on. Source: proc(5), `clear_refs`."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")
        return self._memory("VmRSS")

    @property
    def peak(self) -> int:
        """The most resident memory since then."""
        return self._memory("VmHWM")


@contextmanager
def attacked(folder: Path) -> Iterator[Attacked]:
    """`folder`: for the log."""
    log = folder / "server.log"
    with (
        log.open("w") as stderr,
        subprocess.Popen(
            [sys.executable, "-m", "tests.http.h2.attacked.server"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        yield Attacked(process, int(process.stdout.readline()), log)
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(30)
        finally:
            process.kill()
