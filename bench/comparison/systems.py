"""The systems that the bench compares: each has a frontend and two workers with mockers, in processes of their own."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.comparison.rounds import OURS, PEER, SMG
from bench.measure.errors import BenchError

WORKERS = 2
ITL_MS = 6.0
"""Time between two tokens: about the step time of the peer's mocker at its own speed."""
START_S_MAX = 60.0
PEER_START_S_MAX = 90.0
END_S_MAX = 10.0
POLL_S = 0.02
LOG_SHOWN = 400
"""Characters to show of the end of a log, if the process did not start."""
PEER_SCRIPT, SMG_SCRIPT = (Path(__file__).parents[1] / "peer" / name for name in ("dynamo.sh", "smg.sh"))
SMG_BACKENDS = 2


@dataclass(frozen=True)
class Running:
    """A running system.

    `url`: of its HTTP API. `grpc`: the address of its gRPC API, if it has one. `pid`: of its frontend. `workers`: their
    pids. `repeats`: whether its mocker gives the same request the same text.
    """

    url: str
    pid: int
    workers: Sequence[int]
    version: str
    grpc: str | None = None
    repeats: bool = False

    def at(self, kind: str) -> str:
        """The address that serves a kind of wire: see `bench.clients.requests.wire_of`."""
        if kind != "grpc":
            return self.url.removeprefix("http://")
        assert self.grpc is not None, "it has gRPC"
        return self.grpc


System = Callable[[float], AbstractContextManager[Running]]
"""Starts a system whose mockers take this many ms per token, and stops it when the context ends.

Raises BenchError if the system does not start.
"""


@contextmanager
def ours(itl_ms: float) -> Iterator[Running]:
    with ExitStack() as stack:
        plane = _Plane(stack, itl_ms, frontends=1)
        served = plane.served[0]
        yield Running(
            url=f"http://{served['http']}",
            pid=plane.frontends[0].pid,
            workers=[worker.pid for worker in plane.workers],
            version=version("unbroken"),
            grpc=served["grpc"],
            repeats=True,
        )


@contextmanager
def smg(itl_ms: float) -> Iterator[Running]:
    """Start SMG before two of our frontends. Its CPU alone counts."""
    with ExitStack() as stack:
        plane = _Plane(stack, itl_ms, frontends=SMG_BACKENDS)
        stack.callback(_run, SMG_SCRIPT, "down")
        urls = [f"http://{served['http']}" for served in plane.served]
        started = json.loads(_run(SMG_SCRIPT, "up", *urls))
        yield Running(**started, workers=[worker.pid for worker in plane.workers], repeats=True)


class _Plane:
    """A registry, workers and frontends of ours, which end with the stack. `served`: the frontends' addresses."""

    def __init__(self, stack: ExitStack, itl_ms: float, frontends: int) -> None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def start(name: str, *options: str) -> Process:
            return stack.enter_context(Process(folder, name, *options))

        address = start("registry", "registry", "--listen=127.0.0.1:0").ready()["address"]
        registry = f"--registry={address}"
        mocker = ("worker", "--listen=127.0.0.1:0", f"--mocker-itl-ms={itl_ms}", registry)
        self.workers = [start(f"worker-{number}", *mocker) for number in range(WORKERS)]
        words = ("frontend", "--http-listen=127.0.0.1:0", "--grpc-listen=127.0.0.1:0", registry)
        self.frontends = [start(f"frontend-{number}", *words) for number in range(frontends)]
        self.served = [frontend.ready() for frontend in self.frontends]
        for frontend in self.frontends:
            frontend.wait_log("worker found", times=WORKERS)


class Process:
    """One process of `unbroken`, killed when the context ends."""

    def __init__(self, folder: Path, name: str, *arguments: str) -> None:
        self._log = folder / f"{name}.log"
        self._ready = folder / f"{name}.ready"
        words = [*arguments, "--log-format=json", f"--ready-file={self._ready}"]
        with self._log.open("w") as log:
            self._process = subprocess.Popen([sys.executable, "-m", "services", *words], stdout=log, stderr=log)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ready(self) -> Any:
        """Return the addresses from its ready file. Raises BenchError if there is none within START_S_MAX."""
        self._wait(self._ready.exists)
        return json.loads(self._ready.read_text())

    def wait_log(self, event: str, times: int) -> None:
        """Wait until it has logged this event that many times. Raises BenchError after START_S_MAX."""
        self._wait(lambda: self._log.read_text().count(f'"{event}"') >= times)

    def _wait(self, condition: Callable[[], bool]) -> None:
        give_up_at = time.monotonic() + START_S_MAX
        while not condition():
            if self._process.poll() is not None or time.monotonic() > give_up_at:
                raise BenchError(f"did not start: … {' '.join(self._log.read_text().split())[-LOG_SHOWN:]}")
            time.sleep(POLL_S)

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(END_S_MAX)


@contextmanager
def peer(itl_ms: float) -> Iterator[Running]:
    """Start NVIDIA Dynamo with its own mocker, whose tokens are random; see bench/peer/dynamo.sh."""
    try:
        yield Running(**json.loads(_run(PEER_SCRIPT, "up", f"{ITL_MS / itl_ms:g}")))
    finally:
        _run(PEER_SCRIPT, "down")


def why_missing(name: str) -> str | None:
    """Return why a peer cannot be started here; None if it can."""
    try:
        _run(SCRIPTS[name], "check")
    except BenchError as error:
        return f"{name}: {error}"
    return None


def _run(script: Path, *order: str) -> str:
    try:
        done = subprocess.run([script, *order], capture_output=True, text=True, timeout=PEER_START_S_MAX)
    except subprocess.TimeoutExpired as error:
        raise BenchError(str(error)) from error
    if done.returncode:
        raise BenchError(done.stderr.strip().rpartition("error: ")[2])
    return done.stdout


SYSTEMS: Mapping[str, System] = {OURS: ours, PEER: peer, SMG: smg}
SCRIPTS: Mapping[str, Path] = {PEER: PEER_SCRIPT, SMG: SMG_SCRIPT}
"""How the peers are started."""
