"""What streams cost a server per token, by the wire that carries them.

All wires have the same client: it reads raw sockets, and takes a fraction of what it measures. A grpc.aio client would
take as much CPU per message as the server does, and be the bottleneck.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bench.clients.client_pool import ClientPool
from bench.clients.requests import wire_of
from bench.clients.wire_probes import probing
from bench.clients.wires import ANSWERED, Wire
from bench.clients.wrk import Load
from bench.comparison.rounds import BARE_H2, ECHO, GRPC, GRPC_EACH, HTTP_1, HTTP_2, Figures
from bench.measure.errors import BenchError
from bench.measure.process_usage import cpu_seconds
from bench.measure.quantiles import milliseconds

CONNECTIONS_MAX = 8
STREAMS_MAX = 256
"""With more streams the bare grpc.aio server, which sends each token by itself, would take minutes."""


@dataclass(frozen=True)
class Column:
    """How the streams of a column arrive. `kind`: see `wire_of`. `connections_max`: None: each has its own."""

    kind: str
    connections_max: int | None = None


COLUMNS: Mapping[str, Column] = {
    HTTP_1: Column("http1"),
    GRPC: Column("grpc", CONNECTIONS_MAX),
    GRPC_EACH: Column("grpc"),
    HTTP_2: Column("http2", CONNECTIONS_MAX),
    ECHO: Column("grpc", CONNECTIONS_MAX),
    BARE_H2: Column("grpc", CONNECTIONS_MAX),
}
OWN = (HTTP_1, GRPC, GRPC_EACH, HTTP_2)
"""Those of our own frontend."""


def wire_figures(address: str, pid: int, column: Column, load: Load) -> Figures:
    """Measure one run against the server process `pid`. Raises BenchError if an answer was refused or cut off."""
    wires: list[Wire] = []
    make = wire_of(column.kind, load.tokens)

    def wire() -> Wire:
        wires.append(make())
        return wires[-1]

    with connected(address, column, load, wire) as pool:
        cpu_s, own_s, began = cpu_seconds(pid), time.process_time(), time.perf_counter()
        tokens = run_load(pool, column, load)
        elapsed_s = time.perf_counter() - began
        cpu_s, own_s = cpu_seconds(pid) - cpu_s, time.process_time() - own_s
    return {
        "cpu_us_per_token": cpu_s * 1e6 / tokens,
        "tokens_per_item": tokens / sum(wire.item_count for wire in wires),
        "tokens_per_s": tokens / elapsed_s,
        "tokens_per_core_s": tokens / cpu_s,
        "cores": cpu_s / elapsed_s,
        "client_cores": own_s / elapsed_s,
    }


def first_token_figures(address: str, column: Column, load: Load) -> Figures:
    """Measure the time to the first token under this load."""
    wire = wire_of(column.kind, load.tokens)
    with connected(address, column, load, wire) as pool, probing(address, column.kind) as first_tokens_s:
        run_load(pool, column, load)
    return milliseconds(first_tokens_s, "first_token_ms", (0.5, 0.99))


def connected(address: str, column: Column, load: Load, wire: Callable[[], Wire]) -> ClientPool:
    """Return clients with open connections."""
    pool = ClientPool(address, connections(column, load), wire)
    pool.connect()
    return pool


def connections(column: Column, load: Load) -> int:
    return load.streams if column.connections_max is None else min(load.streams, column.connections_max)


def run_load(pool: ClientPool, column: Column, load: Load) -> int:
    """Receive all answers. Returns how many tokens they had. Raises BenchError if one was refused or cut off."""
    answered = 0
    for _ in range(load.answers):
        replies = pool.send_all(each=load.streams // connections(column, load))
        if replies.counts.keys() != {ANSWERED}:
            raise BenchError(f"answers over {column.kind}: {dict(replies.counts)}")
        answered += replies.counts[ANSWERED]
    return answered * load.tokens
