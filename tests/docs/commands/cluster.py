"""Clusters that commands of the pages start, on any free ports."""

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.docs.commands.shell import Running, Shell
from tests.integration.harness.plane.processes import NO_VARIABLES, Process
from tests.integration.harness.waiting import wait_until

ANY_PORTS = {"DYN_UP_REGISTRY_PORT": "0", "DYN_UP_GRPC_PORT": "0", "DYN_UP_HTTP_PORT": "0"}
PATIENT = {"DYN_STALL_MS": "30000"}
"""Both cores may be busy with other tests."""
UP_S_MAX = 180.0
CONTENT = '"delta":{"content":"'


@dataclass
class Up:
    """A cluster that is up."""

    shell: Shell
    running: Running
    state_file: Path

    @property
    def state(self) -> Any:
        """What it says of itself at this moment."""
        return json.loads(self.state_file.read_text())

    @property
    def http(self) -> str:
        """Where clients reach it."""
        address: str = self.state["frontends"][0]["http"]
        return address

    def busy_pid(self) -> int:
        """Return the pid of the worker that has a request."""
        (pid,) = [one["pid"] for one in self.state["workers"] if _has_request(one["metrics"])]
        return int(pid)


def _has_request(metrics: str) -> bool:
    return asyncio.run(Process.metric_at(metrics, "dynamo_engine_request")) > 0


@contextmanager
def cluster(folder: Path, words: str, here: Mapping[str, str] = NO_VARIABLES, **variables: str) -> Iterator[Up]:
    """The cluster that the command starts; it ends with the context. here: see `placed`."""
    shell = Shell(folder, DYN_UP_STATE_DIR=str(folder / "run"), **(ANY_PORTS | PATIENT | variables))
    state_file = folder / "run" / "cluster.json"
    with shell.running(words, here) as running:
        wait_until(lambda: state_file.exists() or running.process.poll() is not None, UP_S_MAX)
        assert state_file.exists(), running.output
        yield Up(shell, running, state_file)


def pieces(stream: str) -> list[str]:
    """The pieces of text in a stream that ended well."""
    *events, done, end = stream.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    deltas = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events]
    return [delta["content"] for delta in deltas if delta.get("content")]
