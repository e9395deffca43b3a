"""A plane of real processes for the tests: a registry, a frontend, and the workers that a test asks for."""

import asyncio
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp

from tests.integration.harness.engines import WORK_FILE, Engine, Mocker

WAIT_S = 20.0
"""How long anything may take to happen on a busy machine. Nothing is timed by it."""
POLL_S = 0.01
NOTHING: Mapping[str, str] = MappingProxyType({})


async def until(condition: Callable[[], Any], seconds_max: float = WAIT_S) -> Any:
    """What `condition` returns, awaited where it must be, once that is true."""
    async with asyncio.timeout(seconds_max):
        while True:
            value = condition()
            if inspect.isawaitable(value):
                value = await value
            if value:
                return value
            await asyncio.sleep(POLL_S)


def wait_until(condition: Callable[[], Any], seconds_max: float = WAIT_S) -> Any:
    """The same outside an event loop."""
    give_up_at = time.monotonic() + seconds_max
    while not (value := condition()):
        assert time.monotonic() < give_up_at, f"not within {seconds_max} s: {inspect.getsource(condition)}"
        time.sleep(POLL_S)
    return value


class Nursery:
    """Forks processes; see nursery.py."""

    def __init__(self, *prefix: str) -> None:
        """prefix: words before the command."""
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.integration.harness.nursery"],
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


class Process:
    """One process of the plane: its pid, its log, and what it wrote when it was ready.

    work_file: where an engine that is played tells what it has computed. environment: besides the nursery's.
    """

    def __init__(
        self,
        nursery: Nursery,
        folder: Path,
        name: str,
        *arguments: str,
        environment: Mapping[str, str] = NOTHING,
    ) -> None:
        self.name = name
        self.log_file = folder / f"{name}.log"
        self._ready_file = folder / f"{name}.ready"
        self.work_file = folder / f"{name}.work"
        self._nursery = nursery
        self._status: int | None = None
        self._log: list[dict[str, Any]] = []
        self._log_bytes = 0
        words = [*arguments, "--log-format=json", f"--ready-file={self._ready_file}"]
        given = {WORK_FILE: str(self.work_file), **environment}
        self.pid: int = nursery.order(start=words, log=str(self.log_file), environment=given)

    def wait_ready(self) -> "Process":
        wait_until(lambda: self._ready_file.exists() or self.status() is not None)
        assert self._ready_file.exists(), self.log_file.read_text()
        return self

    @property
    def is_ready(self) -> bool:
        return self._ready_file.exists()

    @property
    def ready(self) -> Any:
        """What the ready file says: its addresses and names."""
        return json.loads(self._ready_file.read_text())

    def signal(self, number: signal.Signals) -> None:
        """Send it; nothing happens to a process that is gone."""
        if self.status() is None:
            # Not reaped by anybody but `status`, so the pid is still its own.
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def status(self) -> int | None:
        """The exit status, minus the signal's number if one ended it; None while it runs."""
        if self._status is None:
            self._status = self._nursery.order(poll=self.pid)
        return self._status

    def events(self, event: str | None = None, **fields: Any) -> list[dict[str, Any]]:
        """The lines of its log so far with this event and these fields."""
        self._read_log()
        return [entry for entry in self._log if event in (None, entry["event"]) and fields.items() <= entry.items()]

    def _read_log(self) -> None:
        with self.log_file.open() as file:
            file.seek(self._log_bytes)
            text = file.read()
        whole, _, _ = text.rpartition("\n")
        self._log_bytes += len(whole.encode()) + bool(whole)
        self._log += [json.loads(line) for line in whole.splitlines() if line.startswith("{")]

    def times(self, event: str, **fields: Any) -> list[float]:
        """When it logged these lines, in Unix time: its own word, however late anybody reads it."""
        return [datetime.fromisoformat(one["timestamp"]).timestamp() for one in self.events(event, **fields)]

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels."""
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
    """The sum of a metric's samples with these labels, 0 without any."""
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
        """Has it a session to that worker, or had one?"""
        return bool(self.events("worker found", instance=worker.ready["instance_id"]))

    def moves(self, request_id: str) -> list[dict[str, Any]]:
        """The moves of one request."""
        return self.events("request moved", request_id=request_id)

    def all_moves(self) -> dict[str, list[dict[str, Any]]]:
        """The moves of each request, by its id."""
        moves: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for move in self.events("request moved"):
            moves[move["request_id"]].append(move)
        return moves


class Plane:
    """One registry, one frontend, any workers."""

    def __init__(
        self,
        nursery: Nursery,
        folder: Path,
        *,
        frontend: tuple[str, ...] = (),
        registry: tuple[str, ...] = (),
        engine: Engine | None = None,
    ) -> None:
        """engine: of its workers; the mocker unless another is given."""
        self.engine: Engine = engine or Mocker()
        self._nursery = nursery
        self._folder = folder
        self._names = count()
        self._registry_options = registry
        self._processes: list[Process] = []
        self.registry = self._start(Process, "registry", "registry", "--listen=127.0.0.1:0", *registry)
        self.registry.wait_ready()
        self.registry_address: str = self.registry.ready["address"]
        self.frontend = self.start_frontend(*frontend)

    def start_frontend(self, *options: str) -> Frontend:
        """A frontend that listens. The plane has one of its own."""
        listen = ("--grpc-listen=127.0.0.1:0", "--http-listen=127.0.0.1:0", f"--registry={self.registry_address}")
        frontend: Frontend = self._start(Frontend, "frontend", "frontend", *listen, *options)
        frontend.wait_ready()
        return frontend

    def _start(self, kind: Any, name: str, *arguments: str, nursery: Nursery | None = None, **more: Any) -> Any:
        process = kind(nursery or self._nursery, self._folder, f"{name}-{next(self._names)}", *arguments, **more)
        self._processes.append(process)
        return process

    def restart_registry(self) -> None:
        """Another registry where the first one was."""
        listen = f"--listen={self.registry_address}"
        self.registry = self._start(Process, "registry", "registry", listen, *self._registry_options)

    def launch(
        self, *options: str, nursery: Nursery | None = None, environment: Mapping[str, str] = NOTHING
    ) -> Process:
        """Start a worker and don't wait for it. Its model is `mocker` unless the options say otherwise.

        environment: what its process has besides what the options come to: see engines.py.
        """
        listen = ("--listen=127.0.0.1:0", "--metrics-port=0", f"--registry={self.registry_address}")
        words = (*listen, *self.engine.words(options))
        given = {**self.engine.environment(options), **environment}
        worker: Process = self._start(Process, "worker", "worker", *words, nursery=nursery, environment=given)
        return worker

    async def worker(self, *options: str, environment: Mapping[str, str] = NOTHING) -> Process:
        """A worker that the frontend has found."""
        return await self.found(self.launch(*options, environment=environment))

    async def found(self, worker: Process) -> Process:
        """The worker, once the frontend has found it."""
        await until(lambda: worker.is_ready and self.frontend.has_found(worker))
        return worker

    @property
    def processes(self) -> list[Process]:
        """All that were started, the dead as well."""
        return list(self._processes)

    async def run(self, command: str, *arguments: str) -> int:
        """The exit status of a command of `unbroken` that ends by itself."""
        log = self._folder / f"{command}-{next(self._names)}.log"
        words = [command, f"--registry={self.registry_address}", *arguments]
        pid = self._nursery.order(start=words, log=str(log))
        status: list[int | None] = [None]

        def has_ended() -> bool:
            status[0] = self._nursery.order(poll=pid)
            return status[0] is not None

        await until(has_ended)
        assert status[0] is not None
        return status[0]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        wait_until(lambda: all(process.status() is not None for process in self._processes))


@contextmanager
def nursery() -> Iterator[Nursery]:
    """A nursery that ends with all its processes."""
    one = Nursery()
    try:
        yield one
    finally:
        one.close()
