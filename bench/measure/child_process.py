"""A child process of the bench that reports in lines of JSON."""

import json
import subprocess
import sys
import threading
from typing import Any

from bench.measure.errors import BenchError

LIFE_S_MAX = 180.0
"""The child is killed after this time, so that a parent that waits for a line is woken up."""


class ChildProcess:
    """Runs `python -m bench.NAME ARGUMENTS`; killed on exit from the context."""

    def __init__(self, name: str, *arguments: object) -> None:
        self._name = name
        words = [sys.executable, "-m", f"bench.{name}", *map(str, arguments)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._killer = threading.Timer(LIFE_S_MAX, self._process.kill)

    @property
    def pid(self) -> int:
        return self._process.pid

    def receive(self) -> Any:
        """Return the next line, decoded. Raises BenchError if the process ends first; standard error shows why."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchError(f"bench.{self._name} ended too early")
        return json.loads(line)

    def start(self) -> None:
        """Release the child from `wait_for_start`."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def __enter__(self) -> "ChildProcess":
        self._killer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._killer.cancel()
        self._process.kill()
        self._process.communicate()


def send(what: object) -> None:
    """In the child: write one line."""
    print(json.dumps(what), flush=True)


def wait_for_start() -> None:
    """In the child: wait until the parent calls `start`."""
    sys.stdin.readline()
