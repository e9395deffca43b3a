"""A process of the bench's own, which says what it has to say in lines of JSON."""

import json
import subprocess
import sys
import threading
from typing import Any

from bench.measure.errors import BenchError

LIFE_S_MAX = 180.0
"""It is killed after so long: then whoever waits for its word learns that it is gone."""


class ChildProcess:
    """`python -m bench.NAME ARGUMENTS`, ended with the context."""

    def __init__(self, name: str, *arguments: object) -> None:
        self._name = name
        words = [sys.executable, "-m", f"bench.{name}", *map(str, arguments)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._killer = threading.Timer(LIFE_S_MAX, self._process.kill)

    @property
    def pid(self) -> int:
        return self._process.pid

    def receive(self) -> Any:
        """Its next line. Raises BenchError if it ends without one; why, it has said on standard error."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchError(f"bench.{self._name} ended too early")
        return json.loads(line)

    def begin(self) -> None:
        """What it waits for in `wait_begin`."""
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
    """In the process: one line."""
    print(json.dumps(what), flush=True)


def wait_for_start() -> None:
    """In the process: until its owner says so."""
    sys.stdin.readline()
