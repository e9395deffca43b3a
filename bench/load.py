"""Loads a frontend with OpenAI streams over HTTP, and reads what they cost it.

Each of so many connections asks for whole answers, one after the other, until a number of them is there: nothing is cut
off, so that the tokens are exact, and every system does the same work however slow it is. `wrk` is the client, because
it costs little beside the frontend. The frontend's CPU time is that of its process, user and system, from /proc.
"""

import http.client
import json
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from bench.crowd import quantiles_ms

PATH = "/v1/completions"
MODEL = "mocker"
PROBE_TOKENS = 2
PROBE_PAUSE_S = 0.05
REPLY_S_MAX = 60.0
RUN_S_MAX = 120
"""That one run may take. `wrk` is ended as soon as all answers are there."""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
SCRIPT = Path(__file__).with_name("whole_answers.lua")


class BenchError(Exception):
    """What a person must do something about before anything can be measured."""


@dataclass(frozen=True)
class Load:
    """streams: connections at a time. answers: on each of them. tokens: of each answer."""

    streams: int
    answers: int
    tokens: int

    @property
    def total_answers(self) -> int:
        return self.streams * self.answers


@dataclass(frozen=True)
class Figures:
    """What one run cost. Times to the first token are those of one more client, which asks again and again."""

    cpu_us_per_token: float
    tokens_per_s: float
    first_token_ms_p50: float
    first_token_ms_p99: float


def measure(url: str, pid: int, load: Load) -> Figures:
    """One run against the frontend with this pid. Raises BenchError if an answer was refused or came short."""
    cpu_before, began = cpu_seconds(pid), time.perf_counter()
    with probing(url) as first_tokens_s:
        run_wrk(url, load)
        elapsed_s = time.perf_counter() - began
    cpu_s = cpu_seconds(pid) - cpu_before
    tokens = load.total_answers * load.tokens
    waits = quantiles_ms(first_tokens_s)
    return Figures(
        cpu_us_per_token=cpu_s * 1e6 / (tokens + PROBE_TOKENS * len(first_tokens_s)),
        tokens_per_s=tokens / elapsed_s,
        first_token_ms_p50=waits["p50"],
        first_token_ms_p99=waits["p99"],
    )


def cpu_seconds(pid: int) -> float:
    return parse_cpu_ticks(Path(f"/proc/{pid}/stat").read_text()) / TICKS_PER_S


def parse_cpu_ticks(stat: str) -> int:
    """User and system time of all threads. Source: proc(5), fields 14 and 15; the name before may hold anything."""
    after_name = stat.rpartition(")")[2].split()
    return int(after_name[11]) + int(after_name[12])


def request_body(tokens: int) -> str:
    return json.dumps(
        {"model": MODEL, "prompt": "The capital of France is", "max_tokens": tokens, "stream": True, "ignore_eos": True}
    )


def require_wrk() -> None:
    if shutil.which("wrk") is None:
        raise BenchError("the bench needs wrk: apt-get install wrk")


def run_wrk(url: str, load: Load) -> None:
    """Until all answers are there."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as body:
        body.write(request_body(load.tokens))
        body.flush()
        wrk = ["wrk", "--threads=1", f"--connections={load.streams}", f"--duration={RUN_S_MAX}s"]
        wrk += [f"--timeout={RUN_S_MAX}s", f"--script={SCRIPT}", url + PATH, "--", body.name, str(load.total_answers)]
        with subprocess.Popen(wrk, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            assert process.stdout is not None
            try:
                check_outcome(process.stdout)
            finally:
                process.kill()


def check_outcome(lines: Iterator[str] | Sequence[str]) -> None:
    """Return where they say that all answers came. Raises BenchError where they tell a failure, or at their end."""
    seen = []
    for line in lines:
        if line.startswith("all answered"):
            return
        if line.startswith("failed: "):
            raise BenchError(f"an answer under load {line.strip()}")
        seen.append(line)
    raise BenchError(f"wrk ended before all answers were there: {' '.join(seen).strip()}")


@contextmanager
def probing(url: str) -> Iterator[list[float]]:
    """Seconds to the first token of short answers, one after the other, for as long as the context is open.

    Raises BenchError at its end if a probe was refused.
    """
    first_tokens_s: list[float] = []
    is_over = threading.Event()

    def probe() -> None:
        while not is_over.is_set():
            first_tokens_s.append(first_token_seconds(url))
            is_over.wait(PROBE_PAUSE_S)

    with ThreadPoolExecutor(1) as pool:
        probes = pool.submit(probe)
        try:
            yield first_tokens_s
        finally:
            is_over.set()
        probes.result()


def first_token_seconds(url: str) -> float:
    """From the request, on a new connection, to the first event. Raises BenchError if it is refused."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=REPLY_S_MAX)
    try:
        began = time.perf_counter()
        connection.request("POST", PATH, request_body(PROBE_TOKENS), {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.readline()
        elapsed_s = time.perf_counter() - began
        if response.status != http.client.OK:
            raise BenchError(f"a probe got status {response.status}")
        response.read()
    finally:
        connection.close()
    return elapsed_s


def wire_bytes_per_token(url: str, tokens: int) -> float:
    """Of one undisturbed answer, framing and all: what the frontend writes for each token."""
    place = urlsplit(url)
    body = request_body(tokens)
    head = f"POST {PATH} HTTP/1.1\r\nHost: {place.netloc}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((place.hostname, place.port), timeout=REPLY_S_MAX) as connection:
        connection.sendall((head + body).encode())
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    status, _, events = answer.partition(b"\r\n\r\n")
    if not status.startswith(b"HTTP/1.1 200 "):
        raise BenchError(f"an answer got {status.splitlines()[0].decode()}")
    return len(events) / tokens
