"""`unbroken up` as a process, and a request to its frontend."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from tests.support.clock import WAIT_S

ANY_PORTS = ("--registry-port=0", "--grpc-port=0", "--http-port=0")


def until(condition: Callable[[], Any]) -> Any:
    """Wait until `condition` returns something true, and return that."""
    deadline = time.monotonic() + WAIT_S
    while not (value := condition()):
        assert time.monotonic() < deadline, "timeout"
        time.sleep(0.01)
    return value


class Up:
    """`unbroken up` as a process."""

    def __init__(self, folder: Path, log: Path, *options: str, import_path: str | None = None) -> None:
        self.state_file = folder / "cluster.json"
        self._log = log
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "services", "up", f"--state-dir={folder}", *options],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=None if import_path is None else os.environ | {"PYTHONPATH": import_path},
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def state(self) -> Any:
        """The content of cluster.json, or None if it does not exist."""
        return json.loads(self.state_file.read_text()) if self.state_file.exists() else None

    def wait_state(self) -> Any:
        """The content of cluster.json, once the cluster is up."""
        return until(lambda: self.process.poll() is None and self.state())

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit status."""
        self.process.send_signal(number)
        return self.process.wait(WAIT_S)


def complete(http: str, model: str = "mocker") -> str:
    """The text of a short completion."""
    body = json.dumps({"model": model, "prompt": "Hi", "max_tokens": 4, "seed": 1, "temperature": 0}).encode()
    request = Request(f"http://{http}/v1/completions", body, {"content-type": "application/json"})
    with urlopen(request, timeout=WAIT_S) as response:
        text: str = json.load(response)["choices"][0]["text"]
    return text


def table_of(up: Up) -> str:
    assert up.process.stdout is not None
    return up.process.stdout.read()


@contextmanager
def started_clusters(folder: Path) -> Iterator[Callable[..., Up]]:
    """Yields a function that starts a cluster. All clusters are killed at the end."""
    started: list[Up] = []

    def start_one(*options: str, **more: str) -> Up:
        started.append(Up(folder / "run", folder / f"{len(started)}.log", *ANY_PORTS, *options, **more))
        return started[-1]

    yield start_one
    for up in started:
        if up.process.poll() is None:
            up.process.kill()
        up.process.communicate()
