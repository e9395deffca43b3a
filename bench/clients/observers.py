"""Observes a frontend during a storm with probes and running streams, which the storm must not affect.

The observers run in a process of their own, so that the load on the clients' process does not delay them.
"""

import multiprocessing
import select
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from bench.clients.client_pool import RECEIVE_BYTES
from bench.measure.quantiles import quantiles_ms

PROBE_EVERY_S = 0.005
PROBE_S_MAX = 60.0


@dataclass(frozen=True)
class Observation:
    """What to observe.

    `probes`: address and path of each probe, by the name to report. `streams`: how many streams to open at `address`
    with `message`. `probe_every_s`: the pause between two probes of a name.
    """

    probes: Mapping[str, tuple[str, str]]
    address: str
    message: bytes
    streams: int
    probe_every_s: float = PROBE_EVERY_S


def _connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=PROBE_S_MAX)


def _probe(address: str, path: str, every_s: float, over: threading.Event, seconds: list[float]) -> None:
    """Probe again and again, each time on a new connection. Raises AssertionError unless the status is 200."""
    while not over.wait(every_s):
        began = time.monotonic()
        with _connect(address) as sock:
            sock.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            head = sock.recv(RECEIVE_BYTES)
        assert head.startswith(b"HTTP/1.1 200"), head
        seconds.append(time.monotonic() - began)


class _Streams:
    """Running streams, and the longest time that each of them received nothing."""

    def __init__(self, observation: Observation) -> None:
        self._epoll = select.epoll()
        self._socks: dict[int, socket.socket] = {}
        self._last_at: dict[int, float] = {}
        self.longest: dict[int, float] = {}
        for _ in range(observation.streams):
            sock = _connect(observation.address)
            sock.sendall(observation.message)
            self._socks[sock.fileno()] = sock
            self._epoll.register(sock, select.EPOLLIN)

    def have_begun(self, number: int) -> bool:
        return len(self._last_at) >= number

    def read(self, over: threading.Event) -> None:
        while not over.is_set():
            for fd, _ in self._epoll.poll(0.1):
                assert self._socks[fd].recv(RECEIVE_BYTES), "a running stream was ended"
                now = time.monotonic()
                self.longest[fd] = max(self.longest.get(fd, 0.0), now - self._last_at.get(fd, now))
                self._last_at[fd] = now

    def close(self) -> None:
        for sock in self._socks.values():
            sock.close()


def _observe(observation: Observation, running: int, pipe: Connection) -> None:
    """The body of the process: reports when `running` streams have begun, and the figures at the end."""
    over, streams = threading.Event(), _Streams(observation)
    seconds: dict[str, list[float]] = {name: [] for name in observation.probes}
    threads = [threading.Thread(target=streams.read, args=(over,))]
    threads += [
        threading.Thread(target=_probe, args=(*where, observation.probe_every_s, over, seconds[name]))
        for name, where in observation.probes.items()
    ]
    for thread in threads:
        thread.start()
    while not streams.have_begun(running):
        time.sleep(PROBE_EVERY_S)
    pipe.send(None)
    pipe.recv()
    over.set()
    for thread in threads:
        thread.join()
    streams.close()
    probed = {name: {"count": len(times), **quantiles_ms(times)} for name, times in seconds.items()}
    pipe.send({"probes_ms": probed, "stream_gap_ms_max": quantiles_ms(list(streams.longest.values()))["max"]})


@contextmanager
def observing(observation: Observation, running: int) -> Iterator[dict[str, Any]]:
    """Observe while the context is open; the yielded dict then has the figures. `running`: streams that must begin."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_observe, args=(observation, running, theirs), daemon=True)
    process.start()
    theirs.close()
    observed: dict[str, Any] = {}
    ours.recv()  # Raises EOFError if the process has failed; its traceback is on standard error.
    try:
        yield observed
    finally:
        ours.send(None)
        observed |= ours.recv()
        process.join()
