"""Commands of `unbroken` as a stranger runs them: fresh processes, whose environment a test chooses from nothing.

Addresses come from the log, so that a command needs no folder for a ready file.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

from tests.integration.harness.waiting import wait_until
from tests.support.clock import WAIT_S

UNBROKEN = Path(sys.executable).with_name("unbroken")
BARE: Mapping[str, str] = {"PATH": os.environ["PATH"]}
"""The environment of `env -i PATH=$PATH`."""
DIRECT = build_opener(ProxyHandler({}))
START_S = 60.0
"""How long a fresh process may take to start on a busy machine."""


class Command:
    """One running command. Its output is in `log`, one JSON object per line besides what libraries print."""

    def __init__(self, log: Path, *words: str, environment: Mapping[str, str] = BARE, prefix: Sequence[str] = ()):
        """`prefix`: words before the command, such as `prlimit --nofile=256`."""
        self.log_file = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [*prefix, str(UNBROKEN), *words],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def events(self, event: str) -> list[dict[str, Any]]:
        """The log lines of this event so far."""
        lines = [json.loads(line) for line in self.log.splitlines() if line.startswith("{") and line.endswith("}")]
        return [line for line in lines if line["event"] == event]

    def wait_event(self, event: str) -> dict[str, Any]:
        """Wait for the first log line of this event, and return it."""
        wait_until(lambda: self.events(event) or self.process.poll() is not None, START_S)
        assert self.events(event), self.log
        return self.events(event)[0]

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit status."""
        self.process.send_signal(number)
        return self.process.wait(WAIT_S)

    def kill(self) -> None:
        """Kill the command with all its children."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(WAIT_S)


class Commands:
    """Starts commands in one environment. See `commands`."""

    def __init__(self, folder: Path, environment: Mapping[str, str], prefix: Sequence[str]) -> None:
        self._folder = folder
        self._environment = environment
        self._prefix = prefix
        self._running: list[Command] = []

    def start(self, *words: str, **environment: str) -> Command:
        """Start `unbroken WORDS`, with further variables."""
        log = self._folder / f"{words[0]}-{len(self._running)}.log"
        given = {**self._environment, **environment}
        self._running.append(Command(log, *words, environment=given, prefix=self._prefix))
        return self._running[-1]

    def registry(self, *options: str, **environment: str) -> str:
        """Start a registry and return its address."""
        one = self.start("registry", "--listen=127.0.0.1:0", "--log-format=json", *options, **environment)
        return str(one.wait_event("registry ready")["address"])

    def worker(self, registry: str, *options: str, **environment: str) -> Command:
        """Start a worker and wait until it serves."""
        one = self.start("worker", f"--registry={registry}", "--log-format=json", *options, **environment)
        one.wait_event("worker ready")
        return one

    def frontend(self, registry: str, *options: str, **environment: str) -> Command:
        """Start a frontend and wait until it listens."""
        listen = ("--grpc-listen=127.0.0.1:0", "--http-listen=127.0.0.1:0")
        given = ("--log-format=json", *listen, *options)
        one = self.start("frontend", f"--registry={registry}", *given, **environment)
        one.wait_event("frontend ready")
        return one

    def run(self, *words: str, text: str = "", **environment: str) -> "subprocess.CompletedProcess[str]":
        """Run a command to its end, with `text` on its standard input."""
        return subprocess.run(
            [*self._prefix, str(UNBROKEN), *words],
            env={**self._environment, **environment},
            input=text,
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )

    def close(self) -> None:
        for command in self._running:
            command.kill()


@contextmanager
def commands(folder: Path, environment: Mapping[str, str] = BARE, prefix: Sequence[str] = ()) -> Iterator[Commands]:
    """Yield a starter of commands in `environment`. All are killed at the end."""
    started = Commands(folder, environment, prefix)
    try:
        yield started
    finally:
        started.close()


def get(address: str, path: str) -> tuple[int, str]:
    """The status and body of a GET at host:port, without a proxy."""
    return _open(Request(f"http://{address}{path}"))


def complete(address: str, model: str = "mocker") -> tuple[int, str]:
    """The status and body of a short completion at a frontend's host:port."""
    body = json.dumps({"model": model, "prompt": "Hi", "max_tokens": 4, "seed": 1, "temperature": 0}).encode()
    return _open(Request(f"http://{address}/v1/completions", body, {"content-type": "application/json"}))


def _open(request: Request) -> tuple[int, str]:
    from urllib.error import HTTPError

    try:
        with DIRECT.open(request, timeout=WAIT_S) as response:
            return response.status, response.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()


def wait_served(address: str, ask: Callable[[str], tuple[int, str]] = complete) -> str:
    """Wait until a request to the frontend is answered with 200, and return the body."""
    answers: list[tuple[int, str]] = []

    def is_answered() -> bool:
        answers[:] = [ask(address)]
        return answers[0][0] == 200

    wait_until(is_answered, START_S)
    return answers[0][1]
