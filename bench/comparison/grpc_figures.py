"""What gRPC streams cost a server, per token.

The client is the one of the storm: it reads HTTP/2 frames from raw sockets, with many streams on a few connections. A
grpc.aio client takes as much CPU per message as the server does, so it would be the bottleneck.
"""

import time
from collections.abc import Iterator

from bench.clients.client_pool import ClientPool
from bench.clients.requests import grpc_request
from bench.clients.wires import ANSWERED, GrpcWire
from bench.clients.wrk import Load
from bench.comparison.rounds import Figures
from bench.measure.errors import BenchError
from bench.measure.process_usage import cpu_seconds

PATH = "/unbroken.v1.Inference/Generate"
CONNECTIONS_MAX = 8
STREAMS_MAX = 256
"""With more streams the bare server, which sends each token by itself, would take minutes."""
_DATA = 0
_PREFIX_BYTES = 5


class CountingWire(GrpcWire):
    """Counts the messages of all answers that have ended."""

    def __init__(self, path: str, message: bytes) -> None:
        super().__init__(path, message)
        self._bodies: dict[int, list[bytes]] = {}
        self.message_count = 0

    def _on_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> bool:
        if kind == _DATA and payload:
            self._bodies.setdefault(stream_id, []).append(payload)
        has_ended = super()._on_frame(kind, flags, stream_id, payload)
        if has_ended:
            self.message_count += sum(1 for _ in split_messages(b"".join(self._bodies.pop(stream_id, []))))
        return has_ended


def split_messages(body: bytes) -> Iterator[bytes]:
    """Yield the messages of a stream's body. Source: gRPC over HTTP/2, Length-Prefixed-Message."""
    start = 0
    while start < len(body):
        size = int.from_bytes(body[start + 1 : start + _PREFIX_BYTES], "big")
        start += _PREFIX_BYTES + size
        yield body[start - size : start]


def grpc_figures(address: str, pid: int, load: Load) -> Figures:
    """Measure one run against the server process `pid`. Raises BenchError if an answer was refused or cut off."""
    connections = min(load.streams, CONNECTIONS_MAX)
    message = grpc_request(load.tokens).SerializeToString()
    wires: list[CountingWire] = []

    def wire() -> CountingWire:
        wires.append(CountingWire(PATH, message))
        return wires[-1]

    with ClientPool(address, connections, wire) as pool:
        pool.connect()
        cpu_s, own_s, began = cpu_seconds(pid), time.process_time(), time.perf_counter()
        answered = 0
        for _ in range(load.answers):
            replies = pool.send_all(each=load.streams // connections)
            if replies.counts.keys() != {ANSWERED}:
                raise BenchError(f"answers over gRPC: {dict(replies.counts)}")
            answered += replies.counts[ANSWERED]
        elapsed_s = time.perf_counter() - began
        cpu_s, own_s = cpu_seconds(pid) - cpu_s, time.process_time() - own_s
    tokens = answered * load.tokens
    return {
        "cpu_us_per_token": cpu_s * 1e6 / tokens,
        "tokens_per_message": tokens / (sum(wire.message_count for wire in wires) - answered),
        "tokens_per_s": tokens / elapsed_s,
        "cores": cpu_s / elapsed_s,
        "client_cores": own_s / elapsed_s,
    }
