"""Send a storm of requests to one worker with few slots, and measure the effect on clients, bystanders and memory.

    python -m bench.storm --requests 5000

There are three storms, each repeated `--rounds` times: requests on new connections, requests on open connections, and
requests over gRPC. Then the time to refuse is measured: clients retry at once while no slot comes free. The last line
is all figures as JSON. The exit status is 1 if a request was lost, a refusal lacked its status, reason or retry delay,
or a process logged an error.
"""

import asyncio
import json
import resource
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from bench.clients.client_pool import ClientPool, Replies
from bench.clients.observers import Observation, observing
from bench.clients.requests import GRPC_PATH
from bench.clients.wires import ANSWERED, REFUSED, GrpcWire, HttpWire, Wire, http_message
from bench.measure.process_usage import cpu_seconds
from bench.measure.quantiles import quantiles_ms
from services.stubs import inference_pb2
from tests.integration.harness.clients.answers import Answer
from tests.integration.harness.clients.requests import Request
from tests.integration.harness.clients.send import outcome
from tests.integration.harness.plane.fork_server import ForkServer
from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.plane.processes import Frontend, Process
from tests.integration.harness.waiting import until

SLOTS = PLACES = 32
ITL_MS = 20
TOKENS = 20
"""Tokens in an answer: 0.4 s, so that slots come free during a storm."""
ENDLESS_TOKENS = 100_000
WATCHED = 8
"""Running streams that are observed during a storm. They hold slots."""
GRPC_CONNECTIONS = 50
LIMITS = (f"--engine-request-limit={SLOTS}", f"--request-queue-limit={PLACES}")
SPARE_FILES = 200
GAUGES = ("dynamo_frontend_inflight_requests", "dynamo_engine_request", "dynamo_request_queue")
BUGS = ("Traceback", '"level": "error"')


def _http(max_tokens: int, *, is_streamed: bool) -> bytes:
    body = {"model": "mocker", "prompt": "storm", "max_tokens": max_tokens, "ignore_eos": True, "stream": is_streamed}
    return http_message("/v1/completions", json.dumps(body).encode())


def _grpc(max_tokens: int) -> bytes:
    message = inference_pb2.GenerateRequest(model="mocker", text="storm")
    message.stop.max_tokens, message.stop.ignore_eos = max_tokens, True
    return message.SerializeToString()


def wires(max_tokens: int) -> dict[str, Callable[[], Wire]]:
    """Return the ways to send a request for this many tokens, by name."""
    streamed, unary = (_http(max_tokens, is_streamed=flag) for flag in (True, False))
    return {
        "stream": lambda: HttpWire(streamed),
        "unary": lambda: HttpWire(unary),
        "grpc": lambda: GrpcWire(GRPC_PATH, _grpc(max_tokens)),
    }


@dataclass(frozen=True)
class Storms:
    """A plane with one worker, and the storms to send to it."""

    plane: Plane
    worker: Process
    requests: int
    rounds: int
    clients: int
    seconds: float

    @property
    def frontend(self) -> Frontend:
        return self.plane.frontend

    @property
    def http(self) -> str:
        return self.frontend.metrics_address

    @property
    def _probes(self) -> dict[str, tuple[str, str]]:
        probes = {path: (self.http, path) for path in ("/live", "/health")}
        if (admin := self.frontend.ready.get("admin_http")) is not None:
            probes |= {f"admin {path}": (admin, path) for path in ("/live", "/health")}
        return probes

    def _observation(self, streams: int, probes: Mapping[str, tuple[str, str]]) -> Observation:
        return Observation(probes, self.http, _http(ENDLESS_TOKENS, is_streamed=True), streams)

    def storm(self, name: str, *, is_open: bool) -> dict[str, Any]:
        """Send all requests at once, while observers watch."""
        number = GRPC_CONNECTIONS if name == "grpc" else self.requests
        address = self.frontend.grpc if name == "grpc" else self.http
        with ClientPool(address, number, wires(TOKENS)[name]) as pool:
            if is_open:
                pool.connect()
            asyncio.run(until(self._takes_requests))
            with observing(self._observation(WATCHED, self._probes), WATCHED) as observed:
                before = self._memory_mib("VmRSS")
                self._reset_peak()
                replies = pool.send_all(self.requests // number)
                peak = self._memory_mib("VmHWM")
        return _reply_figures(replies) | observed | {"rss_mib": {"before": before, "peak": peak}} | self._after_idle()

    def refusals(self, name: str) -> dict[str, Any]:
        """Send requests again and again from all clients while no slot is free."""
        address = self.frontend.grpc if name == "grpc" else self.http
        asyncio.run(until(self._takes_requests))  # The worker may still count as full.
        with observing(self._observation(SLOTS + PLACES, probes={}), SLOTS) as observed:
            asyncio.run(until(lambda: self._is_full()))
            with ClientPool(address, self.clients, wires(TOKENS)[name]) as pool:
                pool.connect()
                pool.send_all()
                before_s = cpu_seconds(self.frontend.pid)
                replies = pool.send_all(for_s=self.seconds)
                cpu_s = cpu_seconds(self.frontend.pid) - before_s
        results = _reply_figures(replies) | {"frontend_cpu_us_each": round(cpu_s / sum(replies.counts.values()) * 1e6)}
        return results | observed | self._after_idle()

    async def _takes_requests(self) -> bool:
        return isinstance(await outcome(self.frontend, Request(max_tokens=1)), Answer)

    async def _is_full(self) -> bool:
        return await self.worker.metric("dynamo_request_queue") == PLACES

    def _after_idle(self) -> dict[str, Any]:
        """Return what is left once all gauges are 0. Raises TimeoutError if they do not return to 0."""
        asyncio.run(until(self._is_idle))
        return {"files_left": self._open_file_count, "rss_mib_after": self._memory_mib("VmRSS")}

    async def _is_idle(self) -> bool:
        addresses = (self.http, self.worker.metrics_address)
        return not sum([await Process.metric_at(address, gauge) for address in addresses for gauge in GAUGES])

    @property
    def _open_file_count(self) -> int:
        return len(list(Path(f"/proc/{self.frontend.pid}/fd").iterdir()))

    def _memory_mib(self, field: str) -> dict[str, float]:
        return {one.name.partition("-")[0]: memory_mib(one.pid, field) for one in (self.frontend, self.worker)}

    def _reset_peak(self) -> None:
        for one in (self.frontend, self.worker):
            Path(f"/proc/{one.pid}/clear_refs").write_text("5")


def bugs_in(process: Process) -> list[str]:
    """Return the lines of the process's log that report a bug."""
    return [line for line in process.log_until_now().splitlines() if any(word in line for word in BUGS)]


def memory_mib(pid: int, field: str) -> float:
    """Return a memory field of a process. Source: proc_pid_status(5)."""
    _, _, rest = Path(f"/proc/{pid}/status").read_text().partition(f"{field}:")
    return round(int(rest.split()[0]) / 1024, 1)


def _reply_figures(replies: Replies) -> dict[str, Any]:
    """Return the counts of the replies, and their durations."""
    total = sum(replies.counts.values())
    return {
        "replies": dict(replies.counts),
        "per_s": round(total / replies.total_s),
        "refused_ms": quantiles_ms(replies.seconds[REFUSED]),
        "answered_ms": quantiles_ms(replies.seconds[ANSWERED]),
        "is_honest": replies.is_honest,
    }


def run(fork_server: ForkServer, folder: Path, frontend: tuple[str, ...], only: str, **options: Any) -> dict[str, Any]:
    plane = Plane(fork_server, folder, frontend=frontend)
    try:
        worker = asyncio.run(plane.worker(*LIMITS, f"--mocker-itl-ms={ITL_MS}"))
        storms = Storms(plane, worker, **options)
        steps: dict[str, Callable[[], dict[str, Any]]] = {
            "connections": lambda: storms.storm("stream", is_open=False),
            "keep-alive": lambda: storms.storm("stream", is_open=True),
            "grpc": lambda: storms.storm("grpc", is_open=True),
        }
        steps = {f"{name} {n}": step for n in range(1, storms.rounds + 1) for name, step in steps.items()}
        steps |= {f"refused {name}": lambda name=name: storms.refusals(name) for name in wires(TOKENS)}  # type: ignore[misc]
        results: dict[str, Any] = {}
        for name, step in steps.items():
            if only in name:
                results[name] = step()
                print(name, json.dumps(results[name]), flush=True)
        return results | {"bugs": bugs_in(plane.frontend) + bugs_in(worker)}
    finally:
        plane.close()


@click.command(help="Send a storm of requests to one worker.", context_settings={"show_default": True})
@click.option("--requests", type=click.IntRange(GRPC_CONNECTIONS), default=5000, help="All at once.")
@click.option("--rounds", type=click.IntRange(1), default=3, help="Repeats of each storm: memory must not grow.")
@click.option("--clients", type=click.IntRange(1), default=64, help="Clients that are refused again and again.")
@click.option("--seconds", type=click.FloatRange(0, min_open=True), default=5.0, help="How long to refuse them.")
@click.option("--only", default="", help="Run only the steps whose names contain this.")
@click.option("--frontend", multiple=True, help="An option of the frontend, such as --stall-ms=3000.")
def main(**options: Any) -> None:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files < options["requests"] + SPARE_FILES:
        needed = options["requests"] + SPARE_FILES
        sys.exit(
            f"error: {needed} open files are needed, and {files} are allowed: raise the limit with ulimit -n {needed}"
        )
    with ForkServer() as fork_server, tempfile.TemporaryDirectory() as folder:
        results = run(fork_server, Path(folder), **options)
    print(json.dumps(results))
    sys.exit(
        0
        if all(step["is_honest"] for step in results.values() if isinstance(step, dict)) and not results["bugs"]
        else 1
    )


if __name__ == "__main__":
    main()
