"""The client of the fork server, which starts processes quickly: see fork_server_main.py."""

import json
import subprocess
import sys
from typing import Any

from tests.support.clock import WAIT_S


class ForkServer:
    """Forks processes from a process that has imported everything."""

    def __init__(self, *prefix: str) -> None:
        """`prefix`: words before the server's command, for example to run it in a network namespace."""
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.integration.harness.plane.fork_server_main"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def order(self, **order: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate(timeout=WAIT_S)

    def __enter__(self) -> "ForkServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
