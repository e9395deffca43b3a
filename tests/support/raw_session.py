"""A session's connection spoken by hand, as worker.proto describes it: whatever a test wants can be sent."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from google.protobuf.message import Message

from services.stubs import worker_pb2

GREETING = b"unbroken.v1.Session\n"


def frame(message: Message | bytes) -> bytes:
    """The message, or bytes that need not be one, after their length."""
    body = message if isinstance(message, bytes) else message.SerializeToString()
    return len(body).to_bytes(4, "big") + body


class RecordingTransport(asyncio.Transport):
    """A transport that keeps what is written."""

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
    """One end. message_type: what the other end sends."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, message_type: Any) -> None:
        self._reader = reader
        self._writer = writer
        self._decode = message_type.FromString

    async def send(self, message: Message | bytes) -> None:
        self.send_raw(frame(message))
        await self._writer.drain()

    def send_raw(self, data: bytes) -> None:
        """Bytes that need not be a frame. Raises ConnectionResetError when the connection is over."""
        if self._writer.is_closing():  # To uvloop a write is then an error of the program's.
            raise ConnectionResetError
        self._writer.write(data)

    async def read(self) -> Any:
        """The next message; None at the end of the connection, however it came."""
        try:
            length = int.from_bytes(await self._reader.readexactly(4), "big")
            return self._decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def until_over(self) -> None:
        """Read on to the end."""
        while await self.read() is not None:
            pass

    def half_close(self) -> None:
        """Say that nothing more comes from here."""
        self._writer.write_eof()

    def close(self) -> None:
        self._writer.close()

    def abort(self) -> None:
        """As when the process is killed."""
        self._writer.transport.abort()


async def open_raw_session(address: str, greeting: bytes = GREETING) -> RawSession:
    """The frontend's end."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(greeting)
    return RawSession(reader, writer, worker_pb2.WorkerMessage)


@asynccontextmanager
async def serve_raw_sessions(
    serve: Callable[[RawSession], Awaitable[None]], host: str = "127.0.0.1"
) -> AsyncIterator[str]:
    """The worker's end of each connection, played by `serve`, which hangs up by returning; the address.

    Raises what `serve` raised.
    """
    failures: list[BaseException] = []
    tasks: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            assert await reader.readexactly(len(GREETING)) == GREETING
            await serve(RawSession(reader, writer, worker_pb2.FrontendMessage))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # The frontend left, or it was somebody who looked whether there is a port.
        except Exception as failure:
            failures.append(failure)
        finally:
            writer.close()

    def on_connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(connected(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(on_connected, host, 0)
    try:
        yield f"{host}:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
    if failures:
        raise failures[0]
