"""Child processes for tests of supervision: scripts that they run, and helpers to watch them."""

import asyncio
import io
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.cluster.console import Console
from services.runtime.supervision.child import Child, ChildConfig
from tests.support.clock import WAIT_S

SERVES = (
    "import pathlib, sys, time; print('hello', flush=True); "
    'pathlib.Path(sys.argv[1]).write_text(\'{"address": "here:1"}\'); time.sleep(60)'
)
EXITS = "import sys; print('no such model'); sys.exit(3)"
NEVER_READY = "import time; time.sleep(60)"
STOPS_ON_SIGTERM = "import signal; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); " + SERVES
IGNORES_SIGTERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SERVES


async def until(condition: Callable[[], Any]) -> Any:
    """Wait until `condition` returns something true, and return that."""
    async with asyncio.timeout(WAIT_S):
        while not (value := condition()):
            await asyncio.sleep(0.01)
    return value


def is_alive(pid: int) -> bool:
    """Whether the process runs. A zombie does not count."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


class Supervised:
    """A child that runs `script`, and a record of its output and of its changes."""

    def __init__(self, folder: Path, script: str, name: str = "worker-1", **config: Any) -> None:
        self.output = io.StringIO()
        self.changes: list[int | None] = []
        self.child = Child(
            name,
            lambda ready_file, _last: [sys.executable, "-c", script, str(ready_file)],
            ChildConfig(**config),
            console=Console([name], self.output),
            folder=folder,
            on_change=lambda: self.changes.append(self.pid),
            rng=random.Random(0),
        )

    @property
    def pid(self) -> int | None:
        return self.child.serving.pid if self.child.serving is not None else None
