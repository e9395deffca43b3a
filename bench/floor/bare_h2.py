"""A bare HTTP/2 server: answers each rpc with messages made beforehand, and those of one step leave in one write.

    python -m bench.floor.bare_h2 TOKENS ITL_MS

What HTTP/2 itself costs on asyncio: it decodes no header fields, checks nothing and refuses nothing. All streams step
together, every ITL_MS. A late step is not made up for.
"""

import asyncio
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from bench.clients.wires import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    SETTINGS,
    FrameCutter,
    answer_to,
    frame,
    literal,
)
from bench.floor.bare_grpc import HOST, messages
from bench.measure.child_process import ChildProcess, send
from services.runtime.loop import run_on_loop

PREFACE_BYTES = 24
_STATUS_200 = b"\x88"
_HEAD = _STATUS_200 + literal(b"content-type", b"application/grpc")
_TRAILERS = literal(b"grpc-status", b"0")


@contextmanager
def serving_bare_h2(tokens: int, itl_ms: float) -> Iterator[tuple[str, int]]:
    """Run the server while the context is open; yields its address and pid."""
    with ChildProcess("floor.bare_h2", tokens, itl_ms) as child:
        yield f"{HOST}:{child.receive()}", child.pid


class Connection(asyncio.Protocol):
    """One client. Its windows never close: the bench's clients open them wide. `running`: messages sent, by stream."""

    def __init__(self, connections: set["Connection"], pieces: Sequence[bytes]) -> None:
        """`pieces`: the messages of an answer, each with the prefix of gRPC."""
        self._connections, self._pieces = connections, pieces
        self._heads = [struct.pack(">I", len(piece))[1:] + b"\0\0" for piece in pieces]
        self._unread_preface = PREFACE_BYTES
        self._cutter = FrameCutter()
        self.running: dict[int, int] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]  # uvloop's is of another class.
        self._connections.add(self)
        self._transport.write(frame(SETTINGS, 0, 0, b""))

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)

    def data_received(self, data: bytes) -> None:
        skipped = min(self._unread_preface, len(data))
        self._unread_preface -= skipped
        out = []
        for kind, flags, stream_id, payload in self._cutter.feed(data[skipped:]):
            out.append(answer_to(kind, flags, payload))
            if kind == DATA and flags & END_STREAM:
                out.append(frame(HEADERS, END_HEADERS, stream_id, _HEAD))
                self.running[stream_id] = 0
        self._transport.write(b"".join(out))

    def step(self) -> None:
        """Send each stream its next message, and the marker and the status behind the last one."""
        out: list[bytes] = []
        for stream_id, sent in list(self.running.items()):
            out += (self._heads[sent], stream_id.to_bytes(4, "big"), self._pieces[sent])
            self.running[stream_id] = sent + 1
            if sent + 2 == len(self._pieces):
                out.append(frame(DATA, 0, stream_id, self._pieces[-1]))
                out.append(frame(HEADERS, END_HEADERS | END_STREAM, stream_id, _TRAILERS))
                del self.running[stream_id]
        self._transport.write(b"".join(out))


async def serve(answer: Sequence[bytes], itl_s: float) -> None:
    """Serve until cancelled."""
    pieces = [struct.pack(">BI", 0, len(message)) + message for message in answer]
    connections: set[Connection] = set()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(connections, pieces), HOST, 0)
    send(server.sockets[0].getsockname()[1])
    due = loop.time()
    while True:
        due = max(due + itl_s, loop.time())
        await asyncio.sleep(due - loop.time())
        for connection in list(connections):
            if connection.running:
                connection.step()


if __name__ == "__main__":
    run_on_loop(serve(messages(int(sys.argv[1])), float(sys.argv[2]) * 1e-3))
