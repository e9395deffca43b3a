"""Loads a frontend with OpenAI streams over HTTP, with `wrk` as the client because it costs little beside the frontend.

Every connection receives complete answers, one after another. No answer is cut off, so the number of tokens is exact
and every system does the same work however slow it is.
"""

import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from bench.clients.requests import PATH, request_body
from bench.measure.errors import BenchError

REPLY_S_MAX = 60.0
RUN_S_MAX = 120
"""Longest duration of a run. `wrk` is stopped as soon as all answers have arrived."""
SCRIPT = Path(__file__).with_name("whole_answers.lua")


@dataclass(frozen=True)
class Load:
    """`streams`: concurrent connections. `answers`: on each of them. `tokens`: in each answer."""

    streams: int
    answers: int
    tokens: int

    @property
    def total_answers(self) -> int:
        return self.streams * self.answers

    @property
    def total_tokens(self) -> int:
        return self.total_answers * self.tokens


def require_wrk() -> None:
    if shutil.which("wrk") is None:
        raise BenchError("the bench needs wrk: apt-get install wrk")


def run_wrk(url: str, load: Load) -> None:
    """Run until all answers have arrived. Raises BenchError if one was refused or incomplete."""
    with tempfile.NamedTemporaryFile(suffix=".json") as body:
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
    """Return at the line that reports all answers. Raises BenchError at one that reports a failure, or at the end."""
    seen = []
    for line in lines:
        if line.startswith("all answered"):
            return
        if line.startswith("failed: "):
            raise BenchError(f"an answer under load {line.strip()}")
        seen.append(line)
    raise BenchError(f"wrk ended before all answers had arrived: {' '.join(seen).strip()}")


def wire_bytes_per_event(url: str, tokens: int) -> float:
    """Return the size of an event on the wire, framing included, measured on one undisturbed answer."""
    place = urlsplit(url)
    with socket.create_connection((place.hostname, place.port), timeout=REPLY_S_MAX) as connection:
        connection.sendall(post(place.netloc, request_body(tokens)))
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    status, _, events = answer.partition(b"\r\n\r\n")
    if not status.startswith(b"HTTP/1.1 200 "):
        raise BenchError(f"an answer got {status.splitlines()[0].decode()}")
    return len(events) / events.count(b"data: {")


def post(host: str, body: bytes, headers: str = "") -> bytes:
    """Return a request as it goes over the wire; the connection closes after the response. `headers`: further lines."""
    head = f"POST {PATH} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{headers}"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
