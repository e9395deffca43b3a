"""A few clients in a process of their own that measure the time to the first token, over any wire.

python -m bench.clients.wire_probes ADDRESS KIND

`bench.clients.first_token_probes` does the same beside `wrk`. Here the load is made in Python, which probes in the same
process would wait for.
"""

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from bench.clients.client_pool import RECEIVE_BYTES
from bench.clients.first_token_probes import CLIENTS, PAUSE_S, TOKENS
from bench.clients.requests import wire_of
from bench.clients.wires import ANSWERED, Wire
from bench.clients.wrk import REPLY_S_MAX
from bench.measure.child_process import ChildProcess, send, wait_for_start
from bench.measure.errors import BenchError


@contextmanager
def probing(address: str, kind: str) -> Iterator[list[float]]:
    """Probe while the context is open. The list that it yields has the seconds to each first token from then on.

    Raises BenchError on exit if a probe was refused.
    """
    with ChildProcess("clients.wire_probes", address, kind) as child:
        child.receive()
        first_tokens_s: list[float] = []
        yield first_tokens_s
        child.start()
        seen = child.receive()
        if "failed" in seen:
            raise BenchError(f"a probe {seen['failed']}")
        first_tokens_s += seen["first_tokens_s"]


def first_token_seconds(address: str, wire: Wire) -> float:
    """Return the time from a request on a new connection to its first token. Raises BenchError if it is refused."""
    host, _, port = address.rpartition(":")
    began, first_at = time.perf_counter(), None
    with socket.create_connection((host, int(port)), timeout=REPLY_S_MAX) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(wire.next_request(began))
        while data := sock.recv(RECEIVE_BYTES):
            now = time.perf_counter()
            outcomes = [outcome for outcome, _ in wire.feed(data)]
            first_at = now if first_at is None and wire.item_count else first_at
            if outcomes == [ANSWERED] and first_at is not None:
                return first_at - began
            if outcomes:
                raise BenchError(f"got {outcomes}")
            sock.sendall(wire.reply)
    raise BenchError("was hung up on")


def probe(address: str, wire: Callable[[], Wire], is_over: threading.Event) -> list[float]:
    """Probe until it is over."""
    first_tokens_s = []
    while not is_over.is_set():
        first_tokens_s.append(first_token_seconds(address, wire()))
        is_over.wait(PAUSE_S)
    return first_tokens_s


def main(address: str, kind: str) -> None:
    wire, is_over = wire_of(kind, TOKENS), threading.Event()
    with ThreadPoolExecutor(CLIENTS) as pool:
        probes = [pool.submit(probe, address, wire, is_over) for _ in range(CLIENTS)]
        send("ready")
        wait_for_start()
        is_over.set()
        try:
            send({"first_tokens_s": [seconds for one in probes for seconds in one.result()]})
        except (BenchError, OSError) as error:
            send({"failed": str(error)})


if __name__ == "__main__":
    main(*sys.argv[1:])
