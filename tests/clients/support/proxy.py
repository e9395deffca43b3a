"""A proxy before frontends, like a balancer: it can go over to another frontend, refuse, and cut streams."""

import asyncio
import re
import socket
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from tests.integration.harness.clients.returning import RESET
from tests.support.raw_session import serve_connections

STREAM = re.compile(rb"GET /v1/streams/")
CURSOR = re.compile(rb"(?i)\r\nlast-event-id: ([^\r]*)")
UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
PIECE_BYTES = 65536


class Proxy:
    """Passes each connection on to `server`, HOST:PORT.

    `cursors`: the `Last-Event-ID` of each request for a stream. `pauses_s`: from each cut to the next such request.
    """

    def __init__(self, server: str, cuts: Sequence[bytes] = ()) -> None:
        """`cuts`: regular expressions. The first response to a request for a stream is reset after a match of the first
        one, the second response after one of the second one, and so on.
        """
        self.server = server
        self.cursors: list[str] = []
        self.pauses_s: list[float] = []
        self._cuts = [re.compile(cut, re.DOTALL) for cut in cuts]
        self._cut_at: float | None = None
        self._refuses = False
        self._clients: set[StreamWriter] = set()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """The proxy's URL."""
        async with serve_connections(self._serve) as address:
            yield f"http://{address}"

    def cut_and_refuse(self) -> None:
        """Reset all connections, and refuse the next request for a stream."""
        self._refuses = True
        for writer in self._clients:
            _reset(writer)

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        host, port = self.server.split(":")
        try:
            answers, requests = await asyncio.open_connection(host, int(port))
        except ConnectionError:
            _reset(writer)
            return
        link = _Link()
        self._clients.add(writer)
        try:
            async with asyncio.TaskGroup() as group:
                asking = group.create_task(self._pass_requests(reader, requests, link))
                await self._pass_answers(answers, writer, link)
                asking.cancel()
        finally:
            self._clients.discard(writer)
            requests.transport.abort()

    async def _pass_requests(self, reader: StreamReader, writer: StreamWriter, link: "_Link") -> None:
        """Heads are small and arrive in one piece."""
        while piece := await _piece(reader):
            if STREAM.match(piece):
                self._count(piece)
                if self._refuses:
                    self._refuses, link.is_refused = False, True
                    break
                link.received, link.cut = b"", self._cuts.pop(0) if self._cuts else None
            writer.write(piece)
        writer.close()

    def _count(self, head: bytes) -> None:
        cursor = CURSOR.search(head)
        self.cursors.append("" if cursor is None else cursor[1].decode())
        if self._cut_at is not None:
            self.pauses_s.append(time.monotonic() - self._cut_at)
            self._cut_at = None

    async def _pass_answers(self, reader: StreamReader, writer: StreamWriter, link: "_Link") -> None:
        while piece := await _piece(reader):
            before = len(link.received)
            link.received += piece
            if link.cut is not None and (found := link.cut.search(link.received)):
                writer.write(piece[: max(0, found.end() - before)])
                self._cut_at = time.monotonic()
                _reset(writer)
                return
            writer.write(piece)
        if link.is_refused:
            writer.write(UNAVAILABLE)
        writer.close()


class _Link:
    """One connection. `received`: the response to its last request for a stream. `cut`: where to reset that.
    `is_refused`: the request was not passed on.
    """

    def __init__(self) -> None:
        self.received = b""
        self.cut: re.Pattern[bytes] | None = None
        self.is_refused = False


async def _piece(reader: StreamReader) -> bytes:
    """The next bytes; empty at the end."""
    try:
        return await reader.read(PIECE_BYTES)
    except ConnectionError:
        return b""


def _reset(writer: StreamWriter) -> None:
    """Cut the connection by RST."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.transport.abort()
