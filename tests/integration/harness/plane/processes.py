"""Processes of `unbroken` under test: their addresses, logs, metrics and exit status."""

import json
import os
import re
import signal
from collections import defaultdict
from collections.abc import Mapping
from datetime import datetime
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp

from tests.integration.harness.plane.engines import WORK_FILE
from tests.integration.harness.plane.fork_server import ForkServer
from tests.integration.harness.waiting import until, wait_until
from tests.support.clock import WAIT_S

NO_VARIABLES: Mapping[str, str] = MappingProxyType({})


class Process:
    """One process of the plane: its pid, its log, and the content of its ready file.

    `work_file`: where a fake engine writes how much it has computed. `environment`: variables in addition to the fork
    server's.
    """

    def __init__(
        self,
        fork_server: ForkServer,
        folder: Path,
        name: str,
        *arguments: str,
        environment: Mapping[str, str] = NO_VARIABLES,
    ) -> None:
        self.name = name
        self.log_file = folder / f"{name}.log"
        self._ready_file = folder / f"{name}.ready"
        self.work_file = folder / f"{name}.work"
        self._fork_server = fork_server
        self._status: int | None = None
        self._log: list[dict[str, Any]] = []
        self._log_bytes = 0
        words = [*arguments, "--log-format=json", f"--ready-file={self._ready_file}"]
        given = {WORK_FILE: str(self.work_file), **environment}
        self.pid: int = fork_server.order(start=words, log=str(self.log_file), environment=given)

    def wait_ready(self) -> "Process":
        wait_until(lambda: self._ready_file.exists() or self.status() is not None)
        assert self._ready_file.exists(), self._explain()
        return self

    @property
    def is_ready(self) -> bool:
        return self._ready_file.exists()

    @property
    def ready(self) -> Any:
        """The content of the ready file: addresses and names."""
        return json.loads(self._ready_file.read_text())

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; does nothing if the process has exited."""
        if self.status() is None:
            # Only `status` reaps the process, so the pid cannot have been reused.
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def status(self) -> int | None:
        """Return the exit status, or minus the number of the signal that ended it; None while it runs."""
        if self._status is None:
            self._status = self._fork_server.order(poll=self.pid)
        return self._status

    def events(self, event: str | None = None, **fields: Any) -> list[dict[str, Any]]:
        """Return the log lines so far with this event and these fields. For conditions of `until`: more may follow."""
        self._read_log()
        return [entry for entry in self._log if event in (None, entry["event"]) and fields.items() <= entry.items()]

    def events_until_now(self, event: str | None = None, **fields: Any) -> list[dict[str, Any]]:
        """Return all such log lines about what happened before this call.

        A frontend logs a request in the turn of its event loop that follows the answer. It handles a scrape later.
        """
        self._wait_turn()
        return self.events(event, **fields)

    def log_until_now(self) -> str:
        """Return the text of the log about what happened before this call."""
        self._wait_turn()
        return self.log_file.read_text()

    def _explain(self) -> str:
        """Why the process did not become ready. Its log is not read if that is a pipe: the read would never end."""
        log = self.log_file.read_text() if self.log_file.is_file() else "its log is no file"
        return f"{self.name} ended with {self.status()}: {log}"

    def _wait_turn(self) -> None:
        """Wait until the process has answered a scrape, if it runs and can."""
        if self.status() is not None or not self.is_ready or not self.ready.get("metrics", self.ready.get("http")):
            return
        connection = HTTPConnection(self.metrics_address, timeout=WAIT_S)
        try:
            connection.request("GET", "/metrics")
            connection.getresponse().read()
        except (ConnectionError, HTTPException):  # It exits, or is killed.
            wait_until(lambda: self.status() is not None)
        finally:
            connection.close()

    async def logged(self, event: str, count: int = 1, **fields: Any) -> list[dict[str, Any]]:
        """Wait until the log has at least `count` such lines; return them."""
        lines: list[dict[str, Any]] = await until(
            lambda: found if len(found := self.events(event, **fields)) >= count else None
        )
        return lines

    def _read_log(self) -> None:
        with self.log_file.open() as file:
            file.seek(self._log_bytes)
            text = file.read()
        whole, _, _ = text.rpartition("\n")
        self._log_bytes += len(whole.encode()) + bool(whole)
        self._log += [json.loads(line) for line in whole.splitlines() if line.startswith("{")]

    def times(self, event: str, **fields: Any) -> list[float]:
        """Return the Unix times of these log lines, as the process itself recorded them."""
        lines = self.events_until_now(event, **fields)
        return [datetime.fromisoformat(one["timestamp"]).timestamp() for one in lines]

    async def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples with these labels."""
        return await self.metric_at(self.metrics_address, name, **labels)

    @property
    def metrics_address(self) -> str:
        address: str = self.ready["metrics"]
        return address

    @staticmethod
    async def metric_at(address: str, name: str, **labels: str) -> float:
        async with aiohttp.ClientSession() as session, session.get(f"http://{address}/metrics") as response:
            text = await response.text()
        return sum_of(text, name, **labels)


def sum_of(exposition: str, name: str, **labels: str) -> float:
    """Return the sum of a metric's samples with these labels; 0 if there are none."""
    total = 0.0
    for line in exposition.splitlines():
        found = re.fullmatch(rf"{name}(?:\{{(.*)\}})? (\S+)", line)
        if found and all(f'{key}="{value}"' in (found[1] or "") for key, value in labels.items()):
            total += float(found[2])
    return total


class Frontend(Process):
    """A frontend."""

    @property
    def http(self) -> str:
        return f"http://{self.ready['http']}"

    @property
    def grpc(self) -> str:
        address: str = self.ready["grpc"]
        return address

    @property
    def metrics_address(self) -> str:
        address: str = self.ready["http"]
        return address

    def has_found(self, worker: Process) -> bool:
        """Whether the frontend has or has had a session to the worker."""
        return bool(self.events("worker found", instance=worker.ready["instance_id"]))

    def moves(self, request_id: str) -> list[dict[str, Any]]:
        """Return the log lines of one request's moves."""
        return self.events_until_now("request moved", request_id=request_id)

    def all_moves(self) -> dict[str, list[dict[str, Any]]]:
        """Return the log lines of all moves, by request id."""
        moves: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for move in self.events_until_now("request moved"):
            moves[move["request_id"]].append(move)
        return moves


def children(frontend: Frontend) -> list[int]:
    """Return the pids of a supervisor's processes."""
    return [int(pid) for pid in Path(f"/proc/{frontend.pid}/task/{frontend.pid}/children").read_text().split()]
