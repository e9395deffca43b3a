"""A client of HTTP/2 that does only what a test says, on a raw connection."""

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from hpack import Decoder, Encoder

from services.http.h2.connection import H2Connection
from services.http.h2.settings import INITIAL_WINDOW_SIZE
from services.http.h2.wire.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    ErrorCode,
    Frame,
    FrameReader,
    frame,
    window_update,
)
from tests.http.support import Server

WIDE = 2**30
COMPLETIONS = "/v1/completions"
COMPLETION = {"model": "org/tiny", "prompt": "hi"}
STREAMED = COMPLETION | {"stream": True}


def settings(**values: int) -> bytes:
    """A SETTINGS frame. `window`: INITIAL_WINDOW_SIZE."""
    names = {"window": INITIAL_WINDOW_SIZE}
    payload = b"".join(names[name].to_bytes(2, "big") + value.to_bytes(4, "big") for name, value in values.items())
    return frame(SETTINGS, 0, 0, payload)


@dataclass
class Answer:
    """What a stream has brought so far. `reset`: the code of its RST_STREAM frame."""

    headers: dict[str, str] = field(default_factory=dict)
    trailers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    has_ended: bool = False
    reset: ErrorCode | None = None

    @property
    def status(self) -> int:
        return int(self.headers[":status"])

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Client:
    """The client's end. `seen`: all frames so far. `has_ended`: the server has closed its side."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    seen: list[Frame] = field(default_factory=list)
    has_ended: bool = False
    answers: defaultdict[int, Answer] = field(default_factory=lambda: defaultdict(Answer))
    _frames: FrameReader = field(default_factory=FrameReader)
    _encoder: Encoder = field(default_factory=Encoder)
    _decoder: Decoder = field(default_factory=Decoder)
    _next_id: int = 1

    def send(self, *frames: bytes) -> None:
        self.writer.write(b"".join(frames))

    def block(self, path: str, headers: Mapping[str, str] | None = None, method: str = "POST") -> bytes:
        """The fields of a request."""
        pseudo = [(":method", method), (":scheme", "http"), (":path", path), (":authority", "x")]
        return self._encoder.encode([*pseudo, *(headers or {}).items()])

    def encode(self, fields: Iterable[tuple[str, str]]) -> bytes:
        return self._encoder.encode(list(fields))

    def open(self, path: str, headers: Mapping[str, str] | None = None, method: str = "POST", *, ends: bool) -> int:
        """Send the head of a request. Returns the id of its stream."""
        stream_id, self._next_id = self._next_id, self._next_id + 2
        flags = END_HEADERS | (END_STREAM if ends else 0)
        self.send(frame(HEADERS, flags, stream_id, self.block(path, headers, method)))
        return stream_id

    def get(self, path: str) -> int:
        return self.open(path, method="GET", ends=True)

    def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> int:
        """Send a request with a body, as JSON unless it is bytes. Returns the id of its stream."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        stream_id = self.open(path, headers, ends=False)
        self.send(frame(DATA, END_STREAM, stream_id, data))
        return stream_id

    async def read(self, count: int = 1 << 16) -> bool:
        """Read some frames. Returns False at the end."""
        data = b""
        with suppress(ConnectionError):
            data = await self.reader.read(count)
        self.has_ended = not data
        self._frames.feed(data)
        while (one := self._frames.next()) is not None:
            self.seen.append(one)
            self._take(one)
        return bool(data)

    def _take(self, one: Frame) -> None:
        answer = self.answers[one.stream_id]
        if one.kind == HEADERS:
            fields = {str(name): str(value) for name, value in self._decoder.decode(one.payload)}
            (answer.trailers if answer.headers else answer.headers).update(fields)
        elif one.kind == DATA:
            answer.body += one.payload
        elif one.kind == RST_STREAM:
            answer.reset = ErrorCode(int.from_bytes(one.payload, "big"))
        if one.kind in (HEADERS, DATA) and one.flags & END_STREAM:
            answer.has_ended = True

    async def until(self, condition: Callable[[], object]) -> None:
        """Read until the condition holds."""
        while not condition():
            assert await self.read(), f"the connection ended: {self.seen[-3:]}"

    async def answer(self, stream_id: int) -> Answer:
        """The whole answer, or what there is of it when its stream is reset."""
        answer = self.answers[stream_id]
        await self.until(lambda: answer.has_ended or answer.reset is not None)
        return answer

    async def end(self) -> ErrorCode | None:
        """Read to the end of the connection. Returns the code of the last GOAWAY."""
        while await self.read():
            pass
        return self.goaways[-1][1] if self.goaways else None

    @property
    def goaways(self) -> list[tuple[int, ErrorCode]]:
        """The last stream and the code of each GOAWAY frame."""
        payloads = [one.payload for one in self.seen if one.kind == GOAWAY]
        return [(int.from_bytes(one[:4], "big"), ErrorCode(int.from_bytes(one[4:8], "big"))) for one in payloads]


@asynccontextmanager
async def connected(server: Server, *, window: int = WIDE, greets: bool = True) -> AsyncIterator[Client]:
    """A connection. `window`: what the client takes on each stream; on the connection it takes as much as it can.

    `greets`: it sends the preface and its settings.
    """
    reader, writer = await server.connect()
    client = Client(reader, writer)
    if greets:
        client.send(PREFACE, settings(window=window), window_update(0, WIDE))
    try:
        yield client
    finally:
        if writer.transport.get_write_buffer_size():
            writer.transport.abort()  # To close would wait until the server has read it, longer than the loop runs.
        else:
            writer.close()


class Listener:
    """A client that greets a server, and then only hears what it says."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._frames = FrameReader()

    @classmethod
    async def at(cls, address: str) -> "Listener":
        """Connect, and wait until the server answers. `address`: host:port."""
        host, _, port = address.rpartition(":")
        listener = cls(*await asyncio.open_connection(host, int(port)))
        listener._writer.write(PREFACE + frame(SETTINGS, 0, 0))
        listener._frames.feed(await listener._reader.read(1))
        return listener

    async def kinds_until_closed(self) -> list[int]:
        """The types of all frames, once the server has closed the connection."""
        self._frames.feed(await self._reader.read())
        self._writer.close()
        return [one.kind for one in iter(self._frames.next, None)]


def connection_of(server: Server) -> H2Connection:
    """The server's end of the only connection."""
    [connection] = [one for one in server.clients._open if isinstance(one, H2Connection)]
    return connection
