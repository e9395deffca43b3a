"""Connections that a test serves itself, and sessions whose messages it sends itself, in the format of worker.proto."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from google.protobuf.message import Message

from services.stubs import worker_pb2

GREETING = b"unbroken.v1.Session\n"


def frame(message: Message | bytes) -> bytes:
    """Return a frame with the message, or with bytes that need not be a valid message."""
    body = message if isinstance(message, bytes) else message.SerializeToString()
    return len(body).to_bytes(4, "big") + body


class RecordingTransport(asyncio.Transport):
    """A transport that records what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[bytes] = []
        self.end: str | None = None
        self.reads: list[str] = []

    def pause_reading(self) -> None:
        self.reads.append("paused")

    def resume_reading(self) -> None:
        self.reads.append("resumed")

    @property
    def written(self) -> bytes:
        return b"".join(self.pieces)

    def write(self, data: Any) -> None:
        self.pieces.append(bytes(data))

    def is_closing(self) -> bool:
        return self.end is not None

    def close(self) -> None:
        self.end = "closed"

    def abort(self) -> None:
        self.end = "aborted"


class RawSession:
    """One end of a session. `message_type`: the type of the messages from the other end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, message_type: Any) -> None:
        self._reader = reader
        self._writer = writer
        self._decode = message_type.FromString

    async def send(self, message: Message | bytes) -> None:
        self.send_raw(frame(message))
        await self._writer.drain()

    def send_raw(self, data: bytes) -> None:
        """Send bytes that need not be a frame. Raises ConnectionResetError if the connection is closed."""
        if self._writer.is_closing():  # uvloop treats a write on a closing connection as a bug of the caller.
            raise ConnectionResetError
        self._writer.write(data)

    async def read(self) -> Any:
        """Return the next message; None at the end of the connection, however it ended."""
        try:
            length = int.from_bytes(await self._reader.readexactly(4), "big")
            return self._decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def until_over(self) -> None:
        """Read until the connection ends."""
        while await self.read() is not None:
            pass

    def half_close(self) -> None:
        """Close the sending direction."""
        self._writer.write_eof()

    def close(self) -> None:
        self._writer.close()

    def abort(self) -> None:
        """Reset the connection, as when the process is killed."""
        self._writer.transport.abort()


async def open_raw_session(address: str, greeting: bytes = GREETING) -> RawSession:
    """Connect as a frontend."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(greeting)
    return RawSession(reader, writer, worker_pb2.WorkerMessage)


Connected = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serve_connections(connected: Connected, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Listen, and run `connected` for each connection, which is closed when `connected` returns. Yields the address.

    At the end no connection is open, not even one that is accepted at that moment.
    """
    tasks: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
    is_over = False

    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await connected(reader, writer)

    def on_connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if is_over:
            writer.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(run(reader, writer))
        tasks[task] = writer
        # Not in the task: one that is cancelled before its first step would leave the connection open.
        task.add_done_callback(lambda _: writer.close())

    server = await asyncio.start_server(on_connected, host, port)
    try:
        yield f"{host}:{server.sockets[0].getsockname()[1]}"
    finally:
        is_over = True
        server.close()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for writer in tasks.values():
            writer.transport.abort()
        await server.wait_closed()
    for task in tasks:
        if not task.cancelled():
            task.result()


@asynccontextmanager
async def serve_raw_sessions(
    serve: Callable[[RawSession], Awaitable[None]], host: str = "127.0.0.1"
) -> AsyncIterator[str]:
    """Listen as a worker, and run `serve` for each session, which ends when `serve` returns. Yields the address.

    Raises what `serve` raised.
    """

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            assert await reader.readexactly(len(GREETING)) == GREETING
            await serve(RawSession(reader, writer, worker_pb2.FrontendMessage))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # The frontend left, or something only probed the port.

    async with serve_connections(connected, host) as address:
        yield address
